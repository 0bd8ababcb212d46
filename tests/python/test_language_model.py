"""The demo's language model: training, resuming, sampling, and exports that load without Python."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "build" / "examples"
sys.path.insert(0, str(ROOT / "examples" / "language_model"))


def run(*command) -> subprocess.CompletedProcess:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict]]:
    directory = tmp_path_factory.mktemp("language_model")
    text = directory / "text"
    text.write_text("abcdefgh" * 2000)
    found = train(directory, text)
    return directory, found


def train(directory: Path, text: Path, *options) -> list[dict]:
    done = run(PROGRAMS / "language_model", "train", "--json", "--text", text, "--output", directory,
               "--steps", 60, *options)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_learns_and_resumes(trained):
    directory, (about, *progress) = trained
    assert progress[-1]["step"] == 60
    last = progress[-1]["validation_loss"]
    assert last < about["bigram_loss"] < 0.3  # the text repeats: one byte tells the next
    _, *resumed = train(directory, directory / "text", "--resume")
    assert resumed[-1]["validation_loss"] < last


def test_samples(trained):
    directory, _ = trained
    done = run(PROGRAMS / "language_model", "sample", "--output", directory, "--prompt", "abc",
               "--length", 300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Longer than the context of 128: the cache is refilled on the way.
    assert len(done.stdout.rstrip("\n")) == 303 and done.stdout.startswith("abc")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the text is too short: 0 bytes"), (b"x" * 100, "too short: 100 bytes"),
     (None, "cannot read the text file")],
)  # fmt: skip
def test_bad_text_is_an_error_before_training(content, message, tmp_path):
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    for command in (["check"], ["train", "--output", tmp_path / "out"]):
        done = run(PROGRAMS / "language_model", *command, "--text", text)
        assert done.returncode == 1 and message in done.stderr
    assert not (tmp_path / "out").exists()


def test_exports_load_without_python(trained):
    import export

    directory, _ = trained
    export.export(directory)
    program = PROGRAMS / "run_exported"
    linked = run("ldd", program)
    assert "libpython" not in linked.stdout
    done = run(program, directory)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"torchscript", "aotinductor", "torchscript_gradient"}
    assert all(difference < 1e-4 for difference in found.values())
