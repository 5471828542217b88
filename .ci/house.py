"""The size and the shape of the code: files, lines, comments, imports, and the way of one step.

    python .ci/house.py          # a table, half a minute

Lines are physical lines of Python files. The share of comments is that of lines with a comment in
lines that are neither empty nor part of a docstring. A file is touched by a step if one of its
functions runs between the ends of two consecutive batches of DP-SGD on one linear layer.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("lightning_dp", "callbacks")

IMPORTS = """
import sys, time
import lightning.pytorch
begin = time.perf_counter()
import {module}
seconds = time.perf_counter() - begin
print(sum(name.split(".")[0] == "lightning_dp" for name in sys.modules), f"{{seconds:.2f}}")
"""

STEP = """
import sys, threading, warnings
from pathlib import Path
import lightning.pytorch as L, torch
from lightning_dp.callbacks import DifferentialPrivacy

warnings.simplefilter("ignore")
seen = set()

def record(frame, event, argument):
    seen.add(frame.f_code.co_filename)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Trace(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        sys.setprofile(record if trainer.global_step == 2 else None)
        threading.setprofile(record if trainer.global_step == 2 else None)

data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
trainer = L.Trainer(max_epochs=1, callbacks=[Trace(), privacy], logger=False, accelerator="cpu",
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
root = Path("{root}")
print(*sorted(str(Path(f).relative_to(root)) for f in seen
              if any(f.startswith(str(root / part)) for part in ("lightning_dp", "callbacks"))))
"""


@dataclass(frozen=True)
class Size:
    files: int
    lines: int
    code: int
    comments: int
    docstrings: int

    @property
    def comment_share(self) -> float:
        return self.comments / self.code


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """The numbers of the lines that belong to a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def size_of(paths: list[Path]) -> Size:
    lines = code = comments = docstrings = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        quoted = set(docstring_lines(ast.parse(text)))
        filled = {n for n, line in enumerate(text.splitlines(), 1) if line.strip()}
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        commented = {
            t.start[0] for t in tokens if t.type == tokenize.COMMENT and "noqa" not in t.string
        }
        lines += len(text.splitlines())
        code += len(filled - quoted)
        docstrings += len(quoted)
        comments += len(commented)
    return Size(len(paths), lines, code, comments, docstrings)


def public_names() -> set[str]:
    """The names in ``__all__`` of the packages and of the modules without an underscore at the top."""
    found: set[str] = set()
    for path in python_files(*PACKAGE):
        if path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            target = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == "__all__":
                value = node.value  # type: ignore[attr-defined]
                if isinstance(value, ast.List | ast.Tuple):
                    found |= {
                        str(item.value) for item in value.elts if isinstance(item, ast.Constant)
                    }
    return found


def output_of(code: str) -> str:
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as scratch:  # a fit writes its journal where it runs
        done = subprocess.run(command, capture_output=True, text=True, cwd=scratch, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    package, tests = size_of(python_files(*PACKAGE)), size_of(python_files("tests"))
    print(f"{'':34}{'files':>8}{'lines':>8}")
    for name, size in (("package", package), ("tests", tests)):
        print(f"{name:34}{size.files:8}{size.lines:8}")
    longest = max(python_files(*PACKAGE), key=lambda path: len(path.read_text().splitlines()))
    print(f"longest file of the package       {longest.relative_to(ROOT)}")
    print(
        f"lines with a comment              {package.comments} ({package.comment_share:.1%} of code)"
    )
    print(f"names in __all__ of packages      {len(public_names())}")
    for module in (
        "lightning_dp.callbacks",
        "lightning_dp.accounting",
        "lightning_dp.report.__main__",
    ):
        modules, seconds = output_of(IMPORTS.format(module=module)).split()
        print(f"import {module:32} {modules} modules, {seconds} s above Lightning's")
    touched = output_of(STEP.replace("{root}", str(ROOT))).split()
    print(f"files touched by a step           {len(touched)}: {' '.join(touched)}")


if __name__ == "__main__":
    main()
