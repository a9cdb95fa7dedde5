"""How a job ends when it does not end well: quickly, with a name, and without leaving a process behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ENVIRONMENT, REPOSITORY, rank_pids, read_jsonl, train, train_command

from rollpacker.runtime.checkpoint_folder import CheckpointFolder, damage


class Job:
    """A running two-rank job that has done its first step, found by a marker in its processes' environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.marker = f"ROLLPACKER_TEST_JOB={folder}"
        self.process = subprocess.Popen(
            train_command(2, "trainer.total_training_steps=500", f"trainer.default_local_dir={folder}", *arguments),
            cwd=REPOSITORY,
            env={**ENVIRONMENT, "ROLLPACKER_TEST_JOB": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        metrics = folder / "metrics.jsonl"
        deadline = time.monotonic() + 150
        while not (metrics.exists() and metrics.read_text().strip()):
            assert self.process.poll() is None, self.process.communicate()[1][-3000:]
            assert time.monotonic() < deadline, "the first step took too long"
            time.sleep(0.2)

    def pids(self) -> dict[int, str]:
        """Processes of the job, mpirun and child processes of every kind included, with their command lines."""
        found = {}
        for proc in Path("/proc").iterdir():
            try:
                if proc.name.isdigit() and self.marker in (proc / "environ").read_bytes().decode(errors="replace"):
                    found[int(proc.name)] = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def end(self, timeout_s: float) -> tuple[int, str, float]:
        """Exit code, standard error, and seconds until the end."""
        start = time.monotonic()
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stderr, time.monotonic() - start

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 10
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, left


def test_a_killed_rank_takes_the_job_down(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    os.kill(rank_pids(job.folder)[1], signal.SIGKILL)
    code, stderr, seconds = job.end(timeout_s=60)
    assert code != 0
    assert seconds < 30
    assert "process rank 1" in stderr and "signal 9" in stderr, stderr[-2000:]  # mpirun names the rank and its node
    job.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_no_process(tmp_path: Path, number: int) -> None:
    job = Job(tmp_path / "run")
    job.process.send_signal(number)
    code, _, seconds = job.end(timeout_s=60)
    assert code != 0
    assert seconds < 30
    job.assert_nothing_is_left()


def test_an_exception_names_its_rank(tmp_path: Path) -> None:
    """A dump that lacks a response fails on the rank that needs it; the others do not wait for it."""
    folder = tmp_path / "run"
    dump = tmp_path / "dump"
    first = train(
        2, "trainer.total_training_steps=1", f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={dump}"
    )
    assert first.returncode == 0, first.stderr[-3000:]
    (dump / "step_000001" / "rank_00001.safetensors").unlink()
    start = time.monotonic()
    result = train(2, f"rollout.replay={dump}", f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable")
    assert result.returncode == 2
    assert "holds 64 responses of 16 prompts" in result.stderr
    assert time.monotonic() - start < 60


def test_a_reward_that_fails_costs_its_sample_only(tmp_path: Path) -> None:
    """Raising, dying, hanging and NaN in turn: the run goes on, counts them, and says so."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os, time\n"
        "def score(response, *, prompt_id, **_):\n"
        "    kind = len(response) % 8\n"
        "    if kind == 1: raise ValueError('no such answer')\n"
        "    if kind == 2: os._exit(3)\n"
        "    if kind == 3: return float('nan')\n"
        "    if kind == 4 and 'x' in prompt_id + 'x': time.sleep(0.4)\n"
        "    return 1.0\n"
    )
    result = train(
        2,
        "trainer.total_training_steps=1",
        "data.train_batch_size=4",
        "reward.timeout_s=0.2",
        f"reward.function={reward}:score",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "reward failed" in result.stdout
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["reward/error_count"] > 0
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 4 * 8
    assert sum(s["reward"] == 0.0 for s in samples) == row["reward/error_count"]


def test_a_rank_that_stops_answering_is_named(tmp_path: Path) -> None:
    """SIGSTOP: its own watchdog is stopped, too; the others say so in bounded time and end the job."""
    folder = tmp_path / "run"
    job = Job(folder, "trainer.stall_timeout_s=6")
    os.kill(rank_pids(folder)[1], signal.SIGSTOP)
    code, stderr, seconds = job.end(timeout_s=90)
    assert code == 1
    assert seconds < 30
    assert "nothing has happened for 6 s" in stderr
    assert "Suspect: rank(s) 1, which do not answer at all" in stderr, stderr[-2000:]
    (report,) = (folder / "stall").glob("*/rank_0.txt")
    text = report.read_text()
    assert "exchange.py" in text and "Last events:" in text
    job.assert_nothing_is_left()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 24 MiB: a few checkpoints of the demo's model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_by_name_and_harms_nothing(small_disk: Path) -> None:
    """All checkpoints are kept, so the disk fills up; the newest is whole, and with room the run goes on from it."""
    folder = small_disk / "run"
    arguments = (
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        "trainer.total_training_steps=9",
        f"trainer.default_local_dir={folder}",
    )
    start = time.monotonic()
    result = train(2, *arguments)
    assert time.monotonic() - start < 100
    assert result.returncode == 1
    assert "No space left on device" in result.stderr, result.stderr[-3000:]
    assert "Traceback" not in result.stderr, result.stderr[-3000:]
    checkpoints = CheckpointFolder(folder / "checkpoints")
    newest = checkpoints.steps()[0]
    assert damage(checkpoints.path(newest)) is None
    assert newest >= 2
    for step in checkpoints.steps()[1:]:
        shutil.rmtree(checkpoints.path(step))
    resumed = train(2, *arguments, "trainer.keep_last=1", f"trainer.total_training_steps={newest + 1}")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert checkpoints.steps() == [newest + 1]


def test_a_run_directory_that_cannot_be_written_is_refused(small_disk: Path) -> None:
    folder = small_disk / "run"
    first = train(1, "trainer.total_training_steps=1", f"trainer.default_local_dir={folder}")
    assert first.returncode == 0, first.stderr[-3000:]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for mode in ("auto", "disable"):
        result = train(2, f"trainer.resume_mode={mode}", f"trainer.default_local_dir={folder}", "trainer.save_freq=1")
        assert result.returncode == 2, result.stderr[-3000:]
        assert f"trainer.default_local_dir={folder}: cannot write there (Read-only file system" in result.stderr


def test_the_end_of_the_jobs_time_stops_and_saves(tmp_path: Path) -> None:
    """No signal: the launcher says when the job ends, and the run is over before it."""
    folder = tmp_path / "run"
    end = int(time.time()) + 60
    command = train_command(
        2,
        "trainer.total_training_steps=100000",
        "trainer.save_deadline=25",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder}",
    )
    environment = {**ENVIRONMENT, "SLURM_JOB_END_TIME": str(end)}
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert time.time() < end - 10
    assert result.returncode == 3, result.stderr[-3000:]
    assert "before trainer.save_deadline, and a step takes" in result.stdout
    assert CheckpointFolder(folder / "checkpoints").steps() == [len(read_jsonl(folder / "metrics.jsonl"))]
