"""Two hosts: network namespaces of this machine with an address each, and faults between them.

Needs root on Linux; other machines skip these tests. Each host runs its own torchrun.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from test_distributed import ROOT, SMALL, assert_alike, finish, launch, metrics_of

from core import distributed

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
FLAGS = [*SMALL, "--num-updates", "6", "--run-name", "run"]
LOST = "train.py: another rank died"


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Hosts:
    """Two network namespaces with a cable between them."""

    def __init__(self, logs):
        self.logs = logs
        self.name = {host: f"picorl-{os.getpid()}-{host}" for host in ADDRESSES}

    def open(self):
        for host in ADDRESSES:
            ip("netns", "add", self.name[host])
        a, b = self.name.values()
        ip("link", "add", "veth", "netns", a, "type", "veth", "peer", "name", "veth", "netns", b)
        for host, address in ADDRESSES.items():
            ip("-n", self.name[host], "addr", "add", f"{address}/24", "dev", "veth")
            ip("-n", self.name[host], "link", "set", "lo", "up")
        self.link("up")

    def close(self):
        for host in ADDRESSES:
            self.kill(host)
            subprocess.run(["ip", "netns", "del", self.name[host]], capture_output=True)

    def link(self, state):
        for host in ADDRESSES:
            ip("-n", self.name[host], "link", "set", "veth", state)

    def kill(self, host):
        """Kills torchrun and its workers, as a loss of power would."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.name[host]], capture_output=True, text=True
        )
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def start(self, host, folder, *flags, restarts=0):
        folder.mkdir(parents=True, exist_ok=True)
        settings = f"is_host={int(host == 'a')},read_timeout=30,keep_alive_interval=3"
        command = [
            "ip", "netns", "exec", self.name[host], sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(restarts),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES['a']}:29400",
            "--rdzv-conf", settings, "--local-addr", ADDRESSES[host],
            str(ROOT / "train.py"), *flags,
        ]  # fmt: skip
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "veth",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        with (self.logs / f"{host}.log").open("a") as log:
            return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def start_both(self, folder, *flags, restarts=0):
        return [self.start(host, folder, *flags, restarts=restarts) for host in ADDRESSES]

    def log(self, host):
        return (self.logs / f"{host}.log").read_text()


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    try:
        made.open()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The metrics of the same run in one process."""
    folder = tmp_path_factory.mktemp("one")
    code, _, err = finish(launch(folder, *FLAGS, ranks=1))
    assert code == 0, err
    return metrics_of(folder / "runs" / "run")


def wait_for_update(folder, update, processes):
    """Waits until the checkpoint of this update is complete."""
    for _ in range(1200):
        if any(p.name >= f"000020-{update + 1:06d}"
               for p in (folder / "runs" / "run" / "checkpoint").glob("0*")):  # fmt: skip
            return
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)
    raise AssertionError("no checkpoint")


def wait(process, seconds=200):
    return process.wait(timeout=seconds)


def test_connections_end_a_minute_after_the_last_sign_of_life():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        with ours:
            distributed._notice_lost_links()
            assert ours.fileno() > 0  # still open
            number = socket.IPPROTO_TCP
            idle, every, probes = (ours.getsockopt(number, getattr(socket, f"TCP_KEEP{name}"))
                                   for name in ("IDLE", "INTVL", "CNT"))  # fmt: skip
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert idle + every * probes == 60
            assert ours.getsockopt(number, socket.TCP_USER_TIMEOUT) == 60_000  # milliseconds


@pytest.mark.slow
def test_a_killed_host_ends_the_run_with_one_line_and_one_rank_resumes_it(
    tmp_path, hosts, one_rank
):
    a, b = hosts.start_both(tmp_path, *FLAGS)
    wait_for_update(tmp_path, 2, [a, b])
    hosts.kill("b")
    assert wait(a, 60) == 1 and wait(b) < 0
    assert hosts.log("a").count(LOST) == 1
    assert len(metrics_of(tmp_path / "runs" / "run")) < len(one_rank)
    code, _, err = finish(launch(tmp_path, "--resume", "runs/run", ranks=1))
    assert code == 0, err
    assert_alike(one_rank, metrics_of(tmp_path / "runs" / "run"))


@pytest.mark.seeds
def test_a_replaced_host_continues_from_the_last_checkpoint(tmp_path, hosts, one_rank):
    a, b = hosts.start_both(tmp_path, *FLAGS, restarts=1)
    wait_for_update(tmp_path, 2, [a, b])
    hosts.kill("b")
    b = hosts.start("b", tmp_path, *FLAGS, restarts=1)
    assert (wait(a), wait(b)) == (0, 0), hosts.log("a")
    assert hosts.log("a").count(LOST) == 1
    assert_alike(one_rank, metrics_of(tmp_path / "runs" / "run"))


@pytest.mark.seeds
def test_a_lost_link_ends_the_run_with_a_line_on_each_host(tmp_path, hosts, one_rank):
    a, b = hosts.start_both(tmp_path, *FLAGS)
    wait_for_update(tmp_path, 2, [a, b])
    hosts.link("down")
    assert wait(a, 150) == 1
    for _ in range(600):
        if LOST in hosts.log("b"):
            break
        time.sleep(0.1)
    assert hosts.log("a").count(LOST) == hosts.log("b").count(LOST) == 1
    hosts.link("up")  # torchrun on b waits for that on a until TCP gives up, for 15 minutes
    assert wait(b) == 1
    both = hosts.start_both(tmp_path, "--resume", "runs/run")
    assert [wait(process) for process in both] == [0, 0], hosts.log("a")
    assert_alike(one_rank, metrics_of(tmp_path / "runs" / "run"))


@pytest.mark.seeds
def test_hosts_without_a_shared_folder_are_refused(tmp_path, hosts):
    own = {host: tmp_path / host for host in ADDRESSES}
    both = [hosts.start(host, own[host], *FLAGS) for host in ADDRESSES]
    assert [wait(process) for process in both] == [1, 1]
    for host in ADDRESSES:
        assert hosts.log(host).count("train.py: rank 1 does not see the folder runs/run") == 1
        assert list(own[host].iterdir()) == []


@pytest.mark.seeds
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_resumes_on(tmp_path, one_rank, ranks):
    code, _, err = finish(launch(tmp_path, *FLAGS, "--num-updates", "4"))
    assert code == 0, err
    again = ["--resume", "runs/run", "--num-updates", "6"]
    code, _, err = finish(launch(tmp_path, *again, ranks=ranks))
    assert code == 0, err
    assert_alike(one_rank, metrics_of(tmp_path / "runs" / "run"))
