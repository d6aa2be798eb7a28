"""The layers of the architecture: the imports that each module may have, checked in the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# From low to high; a module imports from lower layers and from its own.
LAYERS = [
    {"types", "errors", "version", "torchvision_cpu", "support", "seeding"},
    {"communicator", "monitor", "precision", "metrics", "warmup"},
    {"storage"},
    {"checkpoints", "sampling"},
    {"data"},
    {"engine", "job_process", "callback", "logger", "models", "precision_names"},
    {"history"},
    {"runner", "loop", "resume", "passes", "steps"},
    {"engines", "callbacks", "loggers", "contrib"},  # but these do not import from one another
    {"train", "train_options", "supervised"},
    {"catalyst"},
    {"commands"},
    {"__main__"},
]
SIDES = {"engines", "callbacks", "loggers", "contrib"}
AT_ROOT = {"engines", "callbacks", "loggers"}  # sub-packages whose folder is not in runnerkit/
FACADES = {"", "dl", "utils"}  # `""` is runnerkit/__init__.py; no other module imports them
OPTIONAL = {
    *(
        "torchvision",
        "tensorboard",
        "pandas",
        "torchmetrics",
        "matplotlib",
        "sklearn",
        "horovod",
        "apex",
        "PIL",
        "rich",
    ),
    *("jinja2", "onnx", "onnxruntime", "onnxscript", "pyarrow", "safetensors", "huggingface_hub", "hydra", "omegaconf"),
    *("pydantic", "optuna", "mlflow", "wandb", "comet_ml", "datasets", "webdataset", "ray"),
}
# With their reasons: the default of IRunner.get_engine must name some engine, users and the command line may name
# another, and one name of a precision stands for an adapter.
ALLOWED = {
    ("runnerkit.runner", "runnerkit.engines.choose"),
    ("runnerkit.runner", "runnerkit.engines.by_name"),
    ("runnerkit.precision_names", "runnerkit.engines.adapters.float8"),
}
# Modules about one optional package, or one that is slow to import, themselves imported where they are used.
_SHARDING = (
    "meshes",
    "meta_model",
    "trial_models",
    "optimizer_shards",
    "sharded_model",
    "tensor_checks",
    "tensor_plan",
)
LATE = {
    *(f"runnerkit.loggers.files.{name}" for name in ("event_files", "hparams_events", "media_events")),
    *(f"runnerkit.engines.sharding.{name}" for name in _SHARDING),
    *("runnerkit.checkpoints.sharded", "runnerkit.models.shards"),
}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (dotted name, file) of the package's modules, as users import them."""
    folders = [("", root / "runnerkit"), *((name, root / name) for name in sorted(AT_ROOT))]
    for package, folder in folders:
        for path in sorted(folder.rglob("*.py")):  # does not follow the symbolic links of runnerkit/
            inner = path.relative_to(folder).with_suffix("").parts
            parts = ("runnerkit", *filter(None, [package]), *(inner[:-1] if inner[-1] == "__init__" else inner))
            yield ".".join(parts), path


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield (module, line, True if at the top level); imports under TYPE_CHECKING are skipped."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(each for child in node.body for each in ast.walk(child))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node not in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from runnerkit import snapshot` imports the module runnerkit.resume.resume_point
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "runnerkit" else [module]
            yield from ((name, node.lineno, node not in inner) for name in names)


def named_in_strings(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (module, line) of strings that are a dotted name of the package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and re.fullmatch(r"runnerkit(\.\w+)+", str(node.value)):
            yield str(node.value), node.lineno


def violations(root: Path) -> list[str]:
    """List every import against the layers, and every name of an upper module in a string, as "file:line: why"."""
    found = []
    for name, path in modules(root):
        layer = _layer(name)
        if layer is None:
            found.append(f"{path.name}:1: {name} is in no layer; add it to tests/layers.py")
            continue
        for module, line, is_top_level in imports(path):
            reason = _why_not(name, layer, module, is_top_level)
            if reason is not None:
                found.append(f"{path.name}:{line}: {name} imports {module}: {reason}")
        for module, line in named_in_strings(path):
            if (target := _layer(module)) is not None and layer < target < len(LAYERS):
                found.append(f"{path.name}:{line}: {name} names {module} in a string: against the layers")
    return found


def _part(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def _layer(name: str) -> int | None:
    part = _part(name)
    if part in FACADES:
        return len(LAYERS)
    return next((index for index, layer in enumerate(LAYERS) if part in layer), None)


def _why_not(name: str, layer: int, module: str, is_top_level: bool) -> str | None:
    top = module.split(".")[0]
    if module.startswith("."):
        return "imports are absolute"
    is_optional = top in OPTIONAL or module.startswith("torch.utils.tensorboard")
    if is_top_level and name not in LATE and (is_optional or module in LATE):
        return "an optional package is imported where it is used"
    if top in {"engines", "callbacks", "loggers", "tests", "examples", "benchmarks"}:
        return "users do not have this package"
    if top != "runnerkit" or (name, module) in ALLOWED:
        return None
    part, own = _part(module), _part(name)
    target = _layer(module)
    if part in FACADES:
        return "nobody inside imports the facades"
    if target is None:
        return "that module is in no layer"
    if own in SIDES and part in SIDES and part != own:
        return "the side packages never import one another"
    if target > layer:
        return "against the layers"
    return None
