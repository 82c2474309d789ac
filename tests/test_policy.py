"""Rules of the code itself: imports flow one way, functions and files stay small, nothing is tied to one machine.

Each check returns its findings as messages, and is itself tested on small wrong files.
"""

from __future__ import annotations

import ast
import fnmatch
import io
import os
import re
import subprocess
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

TEXT_METRICS = ("metrics", "alignment", "keywords", "language", "fluency", "lengths", "hallucination", "entities")
METRICS = tuple(f"reward.{name}" for name in (*TEXT_METRICS, "formats"))
# A file imports from smaller numbers, and from its own package. The first pattern that fits counts.
LAYERS: dict[int, tuple[str, ...]] = {
    1: ("types", "settings", "sections", "cross_checks", "config", "manifest_options", "faults", "signals", "disk"),
    2: (
        "data.*",
        "algorithms.*",
        "tracking",
        "rollout_log",
        "watch",
        "statistics",
        *METRICS,
        "reward.compose",
        "reward.table",
        "reward.recipe",
        "reward.signatures",
        "reward.plugin",
        "reward.summary",
        "reward.speech_quality",
        "reward.pinyin",
        "speech.styles",
        "speech.sound",
        "speech.vq",
    ),
    3: (
        "models.*",
        "training.batch",
        "reward.perplexity",
        "reward.speaker",
        "reward.naturalness",
        "evaluation.*",
        "speech.codecs",
    ),
    4: (
        "rollout.*",
        "training.*",
        "speech.decoder",
        "reward.recogniser",
        "reward.client",
        "reward.transport",
        "reward.server",
        "reward.workers",
        "ports",
    ),
    5: ("launch", "evaluate", "preflight", "score", "stages", "saving", "manifest_commands"),
    6: ("loop", "sft", "commands", "speech_commands", "rank", "replay"),
    7: ("cli",),
}
# The only imports inside a layer that cross packages, each in one direction and with its reason.
ALLOWED = {
    ("settings", "disk"): "a config is written in one move",
    ("sections", "settings"): "the options are made of sections",
    ("config", "s*"): "a command takes the sections that it reads, and is parsed by settings",
    ("c*", "c*"): "its options are checked against each other",
    ("cross_checks", "s*"): "section by section",
    ("manifest_options", "settings"): "its commands are parsed by settings",
    ("reward.*", "data.normalise"): "an error rate is defined on normalised text",
    ("reward.*", "data.languages"): "and a language goes by many names",
    ("reward.*", "data.text_rules"): "and may have rules of its own",
    ("reward.speech_quality", "speech.vq"): "with the mel frames of the codec",
    ("speech.sound", "data.audio"): "what can't be heard is told alike, in files and in memory",
    ("tracking", "speech.sound"): "samples that are speech are kept as sound files",
    ("reward.*", "speech.sound"): "and a reward may listen",
    ("training.batch", "models.family"): "a batch holds what a family's feature extractor makes",
    ("training.*", "rollout.*"): "a rank samples with the weights that it trains",
    ("reward.recogniser", "*.*"): "a recogniser is a rank that samples",
    ("rollout.speaking", "speech.decoder"): "what was sampled is decoded behind the engine",
    ("*", "ports"): "where processes meet",
    ("commands", "speech_commands"): "speechrl synth makes corpora of both kinds",
    ("evaluate", "launch"): "speechrl eval starts ranks of its own",
}
HEAVY = ("ray", "deepspeed", "vllm")  # not in layers 1 and 2, so that their tests take milliseconds
NOT_OURS_TO_IMPORT = ("rewards", "recipes", "tests", "benchmarks", "tools")

MAX_FUNCTION_LINES, MAX_FILE_LINES, MAX_PARAMETERS = 60, 500, 7
REASON = "# long:"  # followed by why; on or above the `def`, or among the first lines of a file

MACHINE_PATH = re.compile(r"""(?<![\w.$}~-])/(?:work|root|home|Users|workspace|mnt|opt|scratch)/[\w.]""")
INDEX_ADDRESS = re.compile(r"https?://\S*(?:pypi|pythonhosted|/simple\b)|(?:index-url|find-links)[ =]+\S*/", re.I)
KILLS_BY_NAME = re.compile(r"\b(?:pkill|killall)\b")


# --- files ----------------------------------------------------------------------------------------------------------


def project_files(root: Path) -> list[Path]:
    """What git tracks or would track; without git, all but hidden folders and what set-up and runs make."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=False)
    if listed.returncode == 0:
        names = sorted({name for name in listed.stdout.decode().split("\0") if name})
        return [root / name for name in names if (root / name).is_file()]
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name == ".ci" or not (name.startswith((".", "__")) or name == "runs")]
        found += [Path(folder) / name for name in names if "egg-info" not in folder]
    return sorted(found)


def text_of(path: Path) -> str | None:
    """None for a binary file."""
    content = path.read_bytes()
    return None if b"\0" in content else content.decode("utf-8")


def is_shell(path: Path) -> bool:
    if path.suffix:
        return path.suffix == ".sh"
    return re.match(r"#!.*\b(?:ba)?sh\b", text_of(path) or "") is not None


FILES = project_files(ROOT)
PYTHON = [path for path in FILES if path.suffix == ".py"]
SHELL = [path for path in FILES if is_shell(path)]


# --- layers ---------------------------------------------------------------------------------------------------------


def modules_of(package: Path) -> dict[str, Path]:
    """{"data.audio": file} of every module below a package folder; a package itself is named by its folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def layer_of(module: str) -> int | None:
    for exact in (True, False):  # a name goes before a pattern: training.batch before training.*
        for layer, patterns in LAYERS.items():
            if any(module == pattern if exact else fnmatch.fnmatch(module, pattern) for pattern in patterns):
                return layer
    return None


def imports_of(path: Path, module: str, known: Iterable[str]) -> list[tuple[int, str]]:
    """(line, full dotted name) of every import, those inside functions included; `from a import b` gives a.b if that
    is a module of ours."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                above = package[: len(package) - node.level + 1]
                base = ".".join(["speechrl", *(part for part in above if part), *filter(None, [node.module])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.append((node.lineno, whole if whole.removeprefix("speechrl.") in known else base))
    return found


def may_import(importer: str, imported: str) -> bool:
    """Both in the table."""
    here, there = layer_of(importer), layer_of(imported)
    assert here is not None and there is not None
    if there != here:
        return there < here
    own_package = importer.rpartition(".")[0]
    if own_package and own_package == imported.rpartition(".")[0]:
        return True
    return any(fnmatch.fnmatch(importer, a) and fnmatch.fnmatch(imported, b) for a, b in ALLOWED)


def check_layers(package: Path) -> list[str]:
    modules = modules_of(package)
    findings = []
    for module, path in modules.items():
        imports = imports_of(path, module, modules)
        if path.name == "__init__.py":
            findings += [f"{path}:{line}: __init__.py imports {name}; leave it empty" for line, name in imports]
            continue
        layer = layer_of(module)
        if layer is None:
            findings.append(f"{path}: {module} has no layer: add it to LAYERS in tests/test_policy.py")
            continue
        for line, name in imports:
            top = name.partition(".")[0]
            ours = name.removeprefix("speechrl.")
            if layer <= 2 and top in HEAVY:
                findings.append(f"{path}:{line}: {module} is in layer {layer}, which does without {top}")
            elif top in NOT_OURS_TO_IMPORT:
                findings.append(f"{path}:{line}: {module} imports {name}, which is no part of the package")
            elif top == "speechrl" and ours in modules and layer_of(ours) and not may_import(module, ours):
                where = f"{module} (layer {layer}) imports {ours} (layer {layer_of(ours)})"
                findings.append(f"{path}:{line}: {where}: data flows one way")
            elif top == "speechrl" and (ours not in modules or modules[ours].name == "__init__.py"):
                findings.append(f"{path}:{line}: {module} imports {name}, which is no module; import the file itself")
    return findings


def test_imports_flow_one_way():
    assert check_layers(ROOT / "speechrl") == []


def test_every_name_in_the_tables_is_in_use():
    modules = modules_of(ROOT / "speechrl")
    files = [module for module, path in modules.items() if path.name != "__init__.py"]
    patterns = [pattern for patterns in LAYERS.values() for pattern in patterns]
    assert [pattern for pattern in patterns if not fnmatch.filter(files, pattern)] == []
    edges = {
        (module, name.removeprefix("speechrl."))
        for module in files
        for _, name in imports_of(modules[module], module, modules)
        if layer_of(name.removeprefix("speechrl.")) == layer_of(module)
    }

    def used(pair: tuple[str, str]) -> bool:
        return any(fnmatch.fnmatch(here, pair[0]) and fnmatch.fnmatch(there, pair[1]) for here, there in edges)

    assert [pair for pair in ALLOWED if not used(pair)] == []


def test_an_allowed_import_is_not_allowed_back():
    assert may_import("training.inference", "rollout.native") and not may_import("rollout.native", "training.inference")
    assert may_import("reward.metrics", "data.normalise") and not may_import("data.normalise", "reward.metrics")
    assert may_import("evaluate", "launch") and not may_import("launch", "evaluate")
    assert may_import("config", "sections") and not may_import("sections", "config")


WRONG_IMPORTS = {
    "upwards": ("data/audio.py", "from speechrl.models.load import x", "data.audio (layer 2) imports models.load"),
    "upwards, in a function": (
        "types.py",
        "def f():\n    import speechrl.loop",
        "types (layer 1) imports loop (layer 6)",
    ),
    "upwards, by package": ("data/audio.py", "from speechrl.models import load", "imports models.load (layer 3)"),
    "upwards, from the root": ("data/audio.py", "from speechrl import loop as l", "imports loop (layer 6)"),
    "upwards, relative": ("data/audio.py", "from ..models.load import x", "imports models.load (layer 3)"),
    "upwards, relative package": ("data/audio.py", "from .. import loop", "imports loop (layer 6)"),
    "upwards, for types only": ("types.py", "if TYPE_CHECKING:\n    import speechrl.loop", "imports loop (layer 6)"),
    "sideways": ("algorithms/kl.py", "from speechrl.data.audio import x", "imports data.audio (layer 2)"),
    "sideways at the top": ("launch.py", "from speechrl.evaluate import x", "imports evaluate (layer 5)"),
    "ray": ("data/audio.py", "import ray", "data.audio is in layer 2, which does without ray"),
    "deepspeed in a function": ("algorithms/kl.py", "def f():\n    from deepspeed.ops import x", "without deepspeed"),
    "vllm": ("types.py", "import vllm.distributed", "does without vllm"),
    "a reward file": ("loop.py", "import rewards.asr", "is no part of the package"),
    "a package": ("loop.py", "from speechrl.data import x", "import the file itself"),
    "a busy __init__": ("data/__init__.py", "from speechrl.types import x", "leave it empty"),
    "not in the table": ("novelty.py", "", "novelty has no layer: add it to LAYERS in tests/test_policy.py"),
    "a new package": ("novelty/one.py", "import os", "novelty.one has no layer: add it to LAYERS"),
}


@pytest.mark.parametrize("case", WRONG_IMPORTS)
def test_a_wrong_import_is_found(case: str, tmp_path: Path):
    name, text, expected = WRONG_IMPORTS[case]
    for module in ("types", "loop", "launch", "evaluate", "data/audio", "models/load"):
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("import os\n")
    for package in ("data", "models"):
        (tmp_path / package / "__init__.py").write_text("")
    assert check_layers(tmp_path) == []
    wrong = tmp_path / name
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_text(text)
    findings = check_layers(tmp_path)
    assert len(findings) == 1
    assert str(wrong) in findings[0] and expected in findings[0]


# --- sizes and exceptions -------------------------------------------------------------------------------------------


def comment_lines(text: str) -> dict[int, str]:
    """{line: comment}."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def check_sizes(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    comments = comment_lines(text)
    findings = []
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES and not any(comments.get(line, "").startswith(REASON) for line in range(1, 30)):
        findings.append(f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}: split it, or say why with {REASON!r}")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(comments.get(line, "").startswith(REASON) for line in (node.lineno - 1, node.lineno)):
            continue
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parameters = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        if length > MAX_FUNCTION_LINES:
            findings.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
        if len(parameters) > MAX_PARAMETERS:
            count = f"{len(parameters)} parameters, at most {MAX_PARAMETERS}"
            findings.append(f"{path}:{node.lineno}: {node.name} has {count}")
    return findings


def catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    return handler.type is None or bool(names & {"Exception", "BaseException"})


def check_broad_excepts(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    comments = comment_lines(text)
    return [
        f"{path}:{node.lineno}: catches everything; name the exceptions, or say why in a comment there"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ExceptHandler)
        and catches_everything(node)
        and not {node.lineno - 1, node.lineno} & comments.keys()
    ]


def test_functions_and_files_are_small():
    assert [finding for path in PYTHON for finding in check_sizes(path)] == []


def test_no_except_catches_everything_without_a_reason():
    assert [finding for path in PYTHON for finding in check_broad_excepts(path)] == []


def test_oversize_code_is_found(tmp_path: Path):
    path = tmp_path / "x.py"

    def findings(text: str) -> list[str]:
        path.write_text(text)
        return [finding.removeprefix(f"{path}:").split(",")[0] for finding in check_sizes(path)]

    function = "def f():\n" + "    x = 1\n" * 59
    assert findings(function) == []
    assert findings(function + "    y = 2\n") == ["1: f has 61 lines"]
    assert findings("class A:\n    async def g(self):\n" + "        x = 1\n" * 60) == ["2: g has 61 lines"]
    assert findings(f"{REASON} one big table\n{function}    y = 2\n") == []
    assert findings("x = 1\n" * 500) == []
    assert findings("x = 1\n" * 501) == [" 501 lines"]
    assert findings(f"{REASON} generated\n" + "x = 1\n" * 501) == []
    assert findings("def f(a, b, c, d, /, e, *, f, g): ...\n") == []
    assert findings("def f(a, b, c, d, /, e, *, f, g, h): ...\n") == ["1: f has 8 parameters"]
    assert findings("class A:\n    def f(self, a, b, c, d, e, f, g): ...\n") == []


@pytest.mark.parametrize("caught", ["", " Exception", " BaseException as error", " (ValueError, Exception)"])
def test_a_broad_except_is_found(caught: str, tmp_path: Path):
    path = tmp_path / "x.py"
    path.write_text(f"try:\n    f('#')\nexcept{caught}:\n    pass\n")
    assert [finding.startswith(f"{path}:3: ") for finding in check_broad_excepts(path)] == [True]
    for clause in (f"except{caught}:  # users' code", "except OSError:"):
        path.write_text(f"try:\n    f()\n{clause}\n    pass\n")
        assert check_broad_excepts(path) == []


# --- one machine ----------------------------------------------------------------------------------------------------


def check_text(path: Path, pattern: re.Pattern[str], message: str) -> list[str]:
    lines = enumerate((text_of(path) or "").splitlines(), start=1)
    return [f"{path}:{line}: {message}: {text.strip()[:100]}" for line, text in lines if pattern.search(text)]


def test_no_file_names_a_machine_or_a_registry():
    for pattern, message in ((MACHINE_PATH, "a path of one machine"), (INDEX_ADDRESS, "a registry's address")):
        assert [finding for path in FILES for finding in check_text(path, pattern, message)] == []


def test_scripts_end_only_what_they_started():
    code = [path for path in {*SHELL, *PYTHON} if path != Path(__file__).resolve()]
    assert [finding for path in code for finding in check_text(path, KILLS_BY_NAME, "kills by name")] == []


@pytest.mark.parametrize("script", SHELL, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_scripts_parse(script: Path):
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_set_up_and_the_recipes_are_among_the_scripts():
    names = {str(path.relative_to(ROOT)) for path in SHELL}
    assert {"run_train.sh", "run_tests.sh", ".ci/run", "tools/setup.sh", "recipes/asr/quickstart.sh"} <= names


# @ stands for nothing and % for a slash: this file must not hold what it looks for
LINES = {
    MACHINE_PATH: (
        ["cd %work/main", 'open("%home/me/x")', "PATH=%root/bin", "a:%mnt/d"],
        ["rewards/work/x", "%tmp/x", "%dev/null", "~%home/x", "$HOME%work/x", "http:%%example.org", ".%work/x"],
    ),
    INDEX_ADDRESS: (
        ["pip install --index-@url http://h/x", "http@s://pypi.org/x", "find-@links=a/b", "http@://h/simple"],
        ["uv pip install x", "https://arxiv.org/abs/1", "index-url"],
    ),
    KILLS_BY_NAME: (["p@kill -f ray", "sudo kill@all x"], ["kill $pid", "skillally"]),
}


@pytest.mark.parametrize("pattern", LINES)
def test_a_wrong_line_is_found(pattern: re.Pattern[str], tmp_path: Path):
    wrong, right = LINES[pattern]
    path = tmp_path / "x.sh"
    for line in wrong:
        path.write_text(f"echo\n{line.replace('@', '').replace('%', '/')}\n")
        assert [finding.startswith(f"{path}:2: no: ") for finding in check_text(path, pattern, "no")] == [True], line
    for line in right:
        path.write_text(line.replace("%", "/"))
        assert check_text(path, pattern, "no") == [], line
