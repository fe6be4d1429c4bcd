"""The modules that train.py calls: rollouts, sampler, model, batching and the files of a run."""

import logging
import os

import environments.plumbing.installed  # noqa: F401  (torch and others may be missing)

# In an operation of torch, each thread waits for the other threads in a loop before it sleeps. On a
# busy machine the loop occupies a core that another thread needs: a short loop saves a third of the
# time there, and costs some time on a quiet machine. OpenMP reads these variables when torch is
# imported, so they are set before that
if "OMP_WAIT_POLICY" not in os.environ:  # the user's own setting wins
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # turns of the loop: GNU's library, on Linux
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # ms: LLVM's and Intel's, on macOS and Windows

# transformers imports torchao wherever it is installed, and PEFT bitsandbytes; both warn about
# kernels that we do not use
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(_name).setLevel(logging.ERROR)
