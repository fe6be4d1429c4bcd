"""Checks, without a GPU, that a release of vLLM has every name and argument that NanoLLM uses.

    pip download --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 vllm==0.32.0
    unzip -q vllm-0.32.0-*.whl '*.py' '*METADATA' -d vllm-0.32.0
    python runs/vllm_contract/contract.py vllm-0.26.0 vllm-0.32.0 vllm-0.33.0 --write

Reads our sources and vLLM's with `ast`; imports neither. Imports, attributes, arguments, replaced
and overridden functions and environment variables are found in our sources. Only TYPES is written
by hand: which of our expressions are objects of which class of vLLM. Prints a table; exit code 1 if
a name is missing that is not asked for with hasattr or getattr first.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import tyro

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = (
    "core/nanollm.py", "core/weight_sharing.py", "core/load_trace.py",
    "runs/benchmarks/gpu_steps.py",
)  # fmt: skip
TYPES = {  # expressions in SOURCES, as ast.unparse prints them
    "self.engine": "vllm.v1.engine.llm_engine.LLMEngine",
    "sampler.engine": "vllm.v1.engine.llm_engine.LLMEngine",
    "self.engine.engine_core": "vllm.v1.engine.core_client.InprocClient",
    "self.engine.engine_core.engine_core": "vllm.v1.engine.core.EngineCore",
    "engine_core": "vllm.v1.engine.core.EngineCore",
    "engine_core.scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "output": "vllm.outputs.RequestOutput",
    "output.outputs[0]": "vllm.outputs.CompletionOutput",
    "completion": "vllm.outputs.CompletionOutput",
    "completion.logprobs": "vllm.logprobs.FlatLogprobs",
    "worker": "vllm.v1.worker.gpu_worker.Worker",
    "worker.model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "worker.model_runner.lora_manager": "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager",
    "arguments": "vllm.EngineArgs",
    "made": "vllm.EngineArgs",
    "request_params": "vllm.SamplingParams",
    "vllm_config": "vllm.config.VllmConfig",
    "plenty": "vllm.v1.kv_cache_interface.KVCacheConfig",
    "spec": "vllm.v1.kv_cache_interface.KVCacheSpec",
    "engine_layer": "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA",
}
GUARDED = ("sampling_mask",)  # used only where `return_sampling_mask` exists


@dataclass(frozen=True, order=True)
class Use:
    """Something of vLLM that our sources use: a name and one fact about it."""

    name: str  # dotted, from "vllm"; or an environment variable
    argument: str = ""  # a keyword, or the number of positional arguments
    parameters: tuple[str, ...] = ()  # of our function that replaces or overrides this one
    optional: bool = False  # our sources ask whether it exists

    def __str__(self) -> str:
        if self.parameters:
            return f"{self.name}: {', '.join(self.parameters)}"
        if self.argument.isdigit():
            return f"{self.name}: {self.argument} positional"
        return f"{self.name}({self.argument}=)" if self.argument else self.name


class Uses(ast.NodeVisitor):
    """Collects in `found` what a file of ours uses of vLLM."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[Use] = set()
        self.optional: set[str] = set(GUARDED)
        self.names: dict[str, str] = {}  # our name -> name in vLLM
        self.strings: dict[str, str] = {}  # our constant -> its value
        self.functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        self.docstrings = {
            n.value for n in ast.walk(tree)
            if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.names |= {a.name: a.name for a in node.names if is_vllm(a.name)}
            elif isinstance(node, ast.ImportFrom) and is_vllm(node.module or ""):
                for alias in node.names:
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    self.add(f"{node.module}.{alias.name}")
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                self.strings |= {ast.unparse(t): node.value.value for t in node.targets}
        self.visit(tree)
        self.found = {
            replace(u, optional=bool(self.optional & {u.argument, *u.name.split(".")}))
            for u in self.found
        }

    def add(self, name: str, argument: str = "", *parameters: str) -> None:
        self.found.add(Use(name, argument, parameters))

    def add_function(self, ours: ast.FunctionDef, name: str, any_names: bool = False) -> None:
        """A function of vLLM that one of ours replaces or overrides."""
        self.add(name)
        if not ours.args.vararg:
            names = parameters_of(ours)
            self.add(name, "", *("_" if any_names else n for n in names))

    def dotted(self, node: ast.expr) -> str:
        """The name in vLLM that an expression of ours refers to, or ""."""
        if known := TYPES.get(ast.unparse(node)):
            return known
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            text = str(node.slice.value)  # sys.modules["vllm.x"]
            return text if is_vllm(text) else ""
        if isinstance(node, ast.Attribute) and (base := self.dotted(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if base := self.dotted(node.value):
            self.add(f"{base}.{node.attr}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = str(node.value)
        is_name = re.fullmatch(r"vllm(\.\w+)+|VLLM_[A-Z0-9_]+", text)
        if is_name and node not in self.docstrings:
            self.add(text)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        guards = function in ("hasattr", "getattr")
        guards = guards and len(node.args) + (function == "hasattr") == 3  # getattr's default
        if guards and (base := self.dotted(node.args[0])):
            name = ast.literal_eval(node.args[1])
            self.optional.add(name)
            self.add(f"{base}.{name}")
        if function.endswith(("patch", "patch.object")):
            *target, ours = node.args
            parts = [self.strings.get(ast.unparse(t), "") or self.dotted(t) for t in target[:1]]
            parts += [ast.literal_eval(t) for t in target[1:]]
            if parts[0] and (replacement := self.functions.get(ast.unparse(ours))):
                self.add_function(replacement, ".".join(parts))
        if name := self.dotted(node.func):
            if node.args and not any(isinstance(a, ast.Starred) for a in node.args):
                self.add(name, str(len(node.args)))
            for keyword in node.keywords:
                for argument in [keyword.arg] if keyword.arg else self.keys(keyword.value):
                    self.add(name, argument)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in filter(None, map(self.dotted, node.bases)):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    self.add_function(method, f"{base}.{method.name}", any_names=True)
        self.generic_visit(node)

    def keys(self, node: ast.expr) -> Iterator[str]:
        """The keys of `**name`: of the dictionaries in our function _name."""
        function = self.functions.get(f"_{ast.unparse(node)}")
        for inner in ast.walk(function) if function else ():
            if isinstance(inner, ast.Dict):
                yield from (k.value for k in inner.keys if isinstance(k, ast.Constant))


def is_vllm(text: str) -> bool:
    return re.fullmatch(r"vllm(\.\w+)*", text) is not None


def parameters_of(function: ast.FunctionDef) -> list[str]:
    """Names of the parameters, without *args and **kwargs, which fit any."""
    return [a.arg for a in function.args.posonlyargs + function.args.args]


class Package:
    """The sources of one release of vLLM in a folder that contains vllm/."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = cache(self._tree)

    @property
    def version(self) -> str:
        [metadata] = self.folder.glob("vllm*.dist-info/METADATA")
        return re.findall(r"^Version: (\S+)", metadata.read_text(), re.MULTILINE)[0]

    def problem(self, use: Use) -> str:
        """What this release lacks, or ""."""
        if use.name.isupper():
            variables = (self.folder / "vllm/envs.py").read_text()
            return "" if f'"{use.name}"' in variables else f"{use.name} is not in vllm/envs.py"
        try:
            module, definition = self.find(use.name)
            if use.argument:
                return self.refused(module, definition, use.argument)
            if use.parameters:
                if not isinstance(definition, ast.FunctionDef):
                    return "is not a function"
                theirs = parameters_of(definition)
                skip = theirs[:1] == ["self"]  # ours may call it otherwise
                pairs = zip(use.parameters[skip:], theirs[skip:], strict=False)
                fits = len(theirs) == len(use.parameters) and all(o in ("_", t) for o, t in pairs)
                return "" if fits else f"its parameters are {', '.join(theirs)}"
        except LookupError as error:
            return str(error.args[0])
        return ""

    def find(self, name: str) -> tuple[str, ast.AST]:
        """The module and the definition of a dotted name; raises LookupError."""
        parts = name.split(".")
        lengths = (n for n in range(len(parts), 0, -1) if self.path(".".join(parts[:n])))
        length = next(lengths, 0)
        if not length:
            raise LookupError(f"no module {parts[0]}")
        module = ".".join(parts[:length])
        definition: ast.AST = self.tree(module)
        for i, part in enumerate(parts[length:], length):
            module, definition = self.member(module, definition, part)
            if i + 1 < len(parts) and isinstance(definition, ast.AnnAssign):
                module, definition = self.annotated(module, definition)
        return module, definition

    def member(self, module: str, owner: ast.AST, name: str) -> tuple[str, ast.AST]:
        """A name in a module or class; follows imports and base classes."""
        if isinstance(owner, ast.Module):
            for node in statements(owner):
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            return self.find(f"{self.absolute(module, node)}.{alias.name}")
                elif name in bound(node):
                    return module, node
            raise LookupError(f"{module} has no {name}")
        if isinstance(owner, ast.Attribute):
            return module, owner  # `self.x = ...`: its type is unknown, so all names pass
        if not isinstance(owner, ast.ClassDef):
            raise LookupError(f"cannot look up {name} in {module}")
        for node in statements(owner):
            if name in bound(node):
                return module, node
        for node in ast.walk(owner):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and ast.unparse(node) == f"self.{name}":
                return module, node
        for base in owner.bases:
            try:
                where, parent = self.find(f"{module}.{ast.unparse(base)}")
                return self.member(where, parent, name)
            except LookupError:
                continue
        raise LookupError(f"{owner.name} has no {name}")

    def annotated(self, module: str, node: ast.AnnAssign) -> tuple[str, ast.AST]:
        """The class in the annotation of a variable: `X`, "X" or `X | None`."""
        text = ast.unparse(node.annotation).strip("'\"").removesuffix(" | None")
        return self.find(f"{module}.{text}")

    def refused(self, module: str, definition: ast.AST, argument: str) -> str:
        """Why a function or class does not take an argument, or ""."""
        positional, keywords, any_keyword = self.signature(module, definition)
        if argument.isdigit():
            fits = int(argument) <= positional
            return "" if fits else f"takes {positional} positional arguments"
        return "" if any_keyword or argument in keywords else f"has no argument {argument}"

    def signature(self, module: str, definition: ast.AST) -> tuple[int, set[str], bool]:
        """Number of positional arguments, the names of all, and whether it takes any keyword."""
        if isinstance(definition, ast.FunctionDef):
            names = parameters_of(definition)
            decorators = {ast.unparse(d) for d in definition.decorator_list}
            is_method = names[:1] in (["self"], ["cls"]) and "staticmethod" not in decorators
            names = names[is_method:]
            arguments = definition.args
            count = sys.maxsize if arguments.vararg else len(names)
            keywords = {*names, *(a.arg for a in arguments.kwonlyargs)}
            return count, keywords, arguments.kwarg is not None
        if not isinstance(definition, ast.ClassDef):
            raise LookupError("is not a function or class")
        for node in definition.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return self.signature(module, node)
        fields: set[str] = set()  # of a dataclass, a Struct or a TypedDict
        for base in definition.bases:
            try:
                where, parent = self.find(f"{module}.{ast.unparse(base)}")
                fields |= self.signature(where, parent)[1]
            except LookupError:
                continue
        own = (n.target for n in definition.body if isinstance(n, ast.AnnAssign))
        fields |= {ast.unparse(target) for target in own}
        return len(fields), fields, False

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that `from ... import` in `module` names."""
        path = self.path(module)
        package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
        parts = package.split(".")
        parts = parts[: len(parts) - node.level + 1] if node.level else []
        return ".".join([*parts, *filter(None, [node.module])])

    def path(self, module: str) -> Path | None:
        base = self.folder.joinpath(*module.split("."))
        paths = (base / "__init__.py", base.with_name(base.name + ".py"))
        return next((path for path in paths if path.exists()), None)

    def _tree(self, module: str) -> ast.Module:
        path = self.path(module)
        assert path is not None, module
        return ast.parse(path.read_text())


def statements(owner: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """The statements of a module or class, those inside `if`, `try` and `with` included."""
    pending: list[ast.AST] = list(owner.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            pending += ast.iter_child_nodes(node)
        elif isinstance(node, ast.stmt):
            yield node


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign):
        return {ast.unparse(node.target)}
    if isinstance(node, ast.Assign):
        return {ast.unparse(target) for target in node.targets}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return set()


def used(root: Path = ROOT, sources: tuple[str, ...] = SOURCES) -> dict[Use, str]:
    """What our sources use of vLLM, and the first file that uses it."""
    found: dict[Use, str] = {}
    for source in sources:
        for use in Uses(ast.parse((root / source).read_text())).found:
            found.setdefault(use, source)
    return found


@dataclass
class Args:
    """Which releases to check."""

    folders: tyro.conf.Positional[tuple[Path, ...]]  # each contains vllm/ and its dist-info
    write: bool = False  # write the table to results.md


def main(args: Args) -> int:
    packages = [Package(folder) for folder in args.folders]
    versions = [package.version for package in packages]
    rows = [f"| used | where | {' | '.join(versions)} |", "| --- " * (2 + len(versions)) + "|"]
    missing = 0
    for use, where in sorted(used().items()):
        problems = [package.problem(use) for package in packages]
        missing += any(problems) and not use.optional
        answers = [f"no: {problem}" if problem else "yes" for problem in problems]
        mark = " (optional)" if use.optional else ""
        rows.append(f"| `{use}`{mark} | {where} | {' | '.join(answers)} |")
    text = "\n".join(rows)
    print(text)
    if args.write:
        (HERE / "results.md").write_text(text + "\n")
    print(f"{len(rows) - 2} names and arguments; {missing} that are needed are missing")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
