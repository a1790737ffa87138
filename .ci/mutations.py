"""Breaks the package in many ways, one by one, and says whether the fast tests notice: `python .ci/mutations.py`.

Words after the command select the mutations whose description contains one of them. Works in a copy of the checkout.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """A fault: in `file` of the package, `old`, which occurs once, becomes `new`. `tests` should notice it."""

    what: str
    file: str
    old: str
    new: str
    tests: str


# fmt: off
MUTATIONS = [
    Mutation("softmax sees one later position after a prefix", "attention/parts/caches.py", ".tril(length - block)",
             ".tril(length - block + 1)", "attention"),
    Mutation("linear: the mask of a chunk includes the next position", "attention/parts/sums.py",
             "(queries @ keys.transpose(-1, -2)).tril() @ values",
             "(queries @ keys.transpose(-1, -2)).tril(1) @ values", "attention"),
    Mutation("decayed sums: the mask of a chunk includes the next position", "attention/parts/sums.py",
             ".exp_().tril_()", ".exp_().tril_(1)", "attention"),
    Mutation("a pattern reaches one position ahead", "attention/parts/spans.py", "(sets, position + 1, start)",
             "(sets, position + 2, start)", "attention"),
    Mutation("a chunk's state includes the chunk itself", "attention/parts/sums.py",
             "y = y + queries @ sums[:, :, :-1]", "y = y + queries @ sums[:, :, 1:]", "attention"),
    Mutation("the causal convolution is shifted by one position", "attention/nystrom.py",
             "places.unsqueeze(1) - block + self.kernel - 1", "places.unsqueeze(1) - block + self.kernel - 2",
             "attention"),
    Mutation("linear: a step adds the key to z twice", "attention/linear.py", "        z.add_(phi_k)\n",
             "        z.add_(phi_k, alpha=2)\n", "attention"),
    Mutation("a step forgets to decay", "attention/parts/sums.py", "        s.mul_(decay.unsqueeze(-1))\n",
             "        pass\n", "attention"),
    Mutation("nystrom: a step's share is too small", "attention/nystrom.py",
             "share = (scores - log_weights).exp_().unsqueeze(-1)",
             "share = (scores - log_weights).exp_().unsqueeze(-1) * 0.999", "attention"),
    Mutation("longformer: a step writes the wrong row of the ring", "attention/longformer.py",
             "row = int(self.locate(torch.tensor(position)))", "row = int(self.locate(torch.tensor(position + 1)))",
             "attention"),
    Mutation("fork_state shares memory", "attention/base.py", "copies > 1 else x.clone()", "copies > 1 else x",
             "attention"),
    Mutation("the ring of a convolution is read in the wrong order", "attention/nystrom.py",
             "recent.oldest.fill_((oldest + 1) % ring)", "recent.oldest.fill_(oldest)", "attention"),
    Mutation("scan: a gradient skips the decay", "attention/parts/sums.py",
             "grad[:, n].addcmul_(decay[:, n], grad[:, n + 1])", "grad[:, n].add_(grad[:, n + 1])", "attention"),
    Mutation("decay weights: the gradient has one sign", "attention/parts/sums.py",
             "settings) - products.sum(", "settings) + products.sum(",
             "attention"),
    Mutation("pairwise products: the own gradient is lost", "attention/parts/sums.py",
             "return grad_q.addcmul_(own, k), grad_k.addcmul_(own, q), grad_decay",
             "return grad_q, grad_k.addcmul_(own, q), grad_decay", "attention"),
    Mutation("sums kernel: the gradient of the decay is halved", "attention/kernels/sums.cpp",
             "? dot(Cp, features, gradient) :", "? dot(Cp, features, gradient) / 2 :",
             "attention/test_sums_kernels.py attention/test_contract.py"),
    Mutation("delta kernel: beta is squared", "attention/kernels/delta.cpp", "const A factor = beta[t]",
             "const A factor = beta[t] * beta[t]",
             "attention/test_contract.py attention/test_compiled_mechanisms.py attention/test_deltanet.py"),
    Mutation("dropout: the gradient ignores the mask", "model/dropout.cpp", "of_branch[i] = E(gradient[i] * scale)",
             "of_branch[i] = E(gradient[i])", "model"),
    Mutation("engine: linear adds a key's features before the map", "native/ops/linear.h",
             "fixed_features(K, map, k, key);", "fixed_features(K, map, q, key);",
             "sampling/test_native_mechanisms.py"),
    Mutation("engine: retention decays in the wrong column", "native/ops/retention.h", "if (column == 0)",
             "if (column == 1)", "sampling/test_native_mechanisms.py"),
    Mutation("int8: rounds down", "native/ops/parts/products_int8.h", "x[i] * inverse + shift));",
             "x[i] * inverse - 0.5f + shift));", "sampling/test_int8.py codec/test_golden.py"),
    Mutation("int8: a scale of 126", "native/ops/parts/products_int8.h", "? most / 127 : NAN", "? most / 126 : NAN",
             "sampling/test_int8.py codec/test_golden.py"),
    Mutation("look-ahead keeps one wrong guess", "native/runner.cpp", "sure = sure && next[r] == guess;",
             "sure = sure && (next[r] == guess || r == 0);", "sampling/test_look_ahead.py"),
    Mutation("look-ahead on a GPU keeps one wrong guess", "attention/kernels/triton_ahead.py",
             "tl.where(values == guesses, ROWS, rows + 1)", "tl.where(values == guesses, ROWS, rows + 2)",
             "sampling/test_cuda_look_ahead.py"),
    Mutation("drawing by inversion skips the first value", "native/inversion.h",
             "if (before + shares[i] > target) break;", "if (i && before + shares[i] > target) break;", "sampling"),
    Mutation("guidance: weight used twice", "sampling/choose.py", "return free + weight * (given - free)",
             "return free + weight * weight * (given - free)", "sampling"),
    Mutation("top-p drops the value at the border", "sampling/choose.py",
             "keep &= mass.cumsum(dim=-1) - mass < filters.top_p", "keep &= mass.cumsum(dim=-1) < filters.top_p",
             "sampling"),
    Mutation("random numbers of an image depend on the batch", "sampling/choose.py", "for index in self.indices]",
             "for index in range(len(self.indices))]", "sampling"),
    Mutation("the scheduled learning rate does not reach the optimizer", "training/learner.py",
             'group["lr"] = rate * group.get("lr_share", 1.0)', 'group["lr"] = group["lr"]', "training"),
    Mutation("resuming forgets the moments of the optimizer", "training/learner.py",
             "complete = load_optimizer_tensors(self.task.optimizer, state.tensors)", "complete = True", "training"),
    Mutation("resuming forgets the random state", "training/learner.py",
             "        restore_random_state(state.tensors, self.task.device)\n", "", "training"),
    Mutation("validation uses the raw weights instead of the average", "training/learner.py",
             "return self.task.model if self.average is None else self.average.module", "return self.task.model",
             "training"),
    Mutation("gradients are not clipped", "training/learner.py", "settings.clip or math.inf", "math.inf", "training"),
    Mutation("a NaN loss trains on", "training/learner.py", "if not (math.isfinite(total) and math.isfinite(norm)):",
             "if False:", "training"),
    Mutation("best/ is saved whenever validated", "training/loop.py",
             "is_best = best is None or bits.bits_per_dim < best", "is_best = True", "training"),
    Mutation("batches: an epoch repeats the permutation", "data/batches.py",
             "np.array([self.seed, epoch], dtype=np.uint64)", "np.array([self.seed, 0], dtype=np.uint64)",
             "data training"),
    Mutation("what an interrupted save wrote is left behind", "files.py",
             "        shutil.rmtree(temporary, ignore_errors=True)\n", "        pass\n",
             "test_files.py test_checkpoint.py"),
    Mutation("bits/dim without the first value", "evaluation/bits.py",
             "return found.sum(dim=1), torch.stack(ranges, dim=1)",
             "return found[:, 1:].sum(dim=1), torch.stack(ranges, dim=1)", "evaluation"),
    Mutation("the standard error is the deviation", "evaluation/bits.py", "/ math.sqrt(len(bits))", "", "evaluation"),
    Mutation("codec: a damaged block is not noticed", "codec/pack.py", "!= block.checksum:",
             "!= block.checksum and False:", "faults/test_packed.py"),
    Mutation("codec: frequencies do not add up", "native/frequencies.h", "+= static_cast<double>(rest);",
             "+= static_cast<double>(rest - 1);", "codec cli/test_compress.py"),
    Mutation("codec: another model decodes", "codec/pack.py", "if program != self.header.program:", "if False:",
             "codec cli/test_compress.py"),
    Mutation("codec: the last tile is not cropped", "codec/items.py",
             "whole[: item.height, : item.width, : item.bands]", "whole[:, :, : item.bands]",
             "codec cli/test_compress.py"),
    Mutation("sample ignores --temperature", "cli/session.py",
             "filters = Filters(self.temperature, self.top_k, self.top_p, weight)",
             "filters = Filters(1.0, self.top_k, self.top_p, weight)", "cli/test_commands.py"),
    Mutation("sample ignores --seed", "cli/session.py", "return Sampler(session.model, self.seed, filters",
             "return Sampler(session.model, 0, filters", "cli/test_commands.py"),
    Mutation("complete keeps one row fewer", "data/parts.py", "np.arange(part.size) < min(count",
             "np.arange(part.size) < min(count - others", "data/test_parts.py cli/test_commands.py"),
    Mutation("framing: the polarity is lost", "data/framing.py", "values = abs(frame.ground - framed)",
             "values = abs(0 - framed)", "data"),
    Mutation("framing: the drawing is not centred", "data/framing.py", "round(wanted - found)",
             "round(wanted - found) + 1", "data"),
    Mutation("folders: the last test picture becomes one for validation", "data/listing.py",
             "free = free[held_out:]", "free = free[held_out - 1:]", "data"),
    Mutation("a shift moves to the wrong side", "data/batches.py", "rows = (np.arange(height) - shifts[:, :1])",
             "rows = (np.arange(height) + shifts[:, :1])", "data"),
]
# fmt: on


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )


def try_mutation(copy: Path, mutation: Mutation) -> str:
    """Return what the tests made of a mutation of the package in `copy`, which is the same afterwards."""
    package, libraries = copy / "linformer_cli", copy / "linformer_cli" / "native" / "libraries"
    file = package / mutation.file
    text = file.read_text() if file.exists() else ""
    if text.count(mutation.old) != 1:
        return "LOST: the text is not in the file once"
    file.write_text(text.replace(mutation.old, mutation.new))
    if compiled := file.suffix in (".h", ".cpp"):
        shutil.copytree(libraries, copy / "libraries", dirs_exist_ok=True)
        run(copy, "linformer_cli.native.build")
    outcome = run(copy, "pytest", "-q", "-x", *(f"tests/{name}" for name in mutation.tests.split()))
    file.write_text(text)
    if compiled:
        shutil.copytree(copy / "libraries", libraries, dirs_exist_ok=True)
    failed = [line for line in outcome.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"noticed by {failed[0].split()[1]}" if failed else "NOT NOTICED"


def main() -> int:
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or any(word in m.what for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
        found = []
        for mutation in chosen:
            found.append(try_mutation(copy, mutation))
            print(f"{mutation.what}: {found[-1]}", flush=True)
    missed = sum(not outcome.startswith("noticed") for outcome in found)
    print(f"{len(found) - missed} of {len(found)} mutations were noticed")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
