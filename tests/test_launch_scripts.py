"""The launch scripts, run with programs of our own in place of gcloud, kubectl, sbatch and ssh: what they call, and when."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from custom_resources import faults

from jaxagent.__main__ import parser
from jaxagent.config import load
from jaxagent.train import SAVE_S
from jaxagent.watchdog import STUCK

HERE = Path(__file__).parents[1] / "launch"
SCRIPTS = sorted(HERE.glob("*.sh"))
# What a shell would take apart.
TRAIN = [
    "--config=configs/maze.py:run local",
    "--workdir=/runs/a b",
    "--config.env.options.distance=(1, 2)",
    "--config.x=$HOME'\"*",
]
OWN = {"tpu-pod": ["--name=pod", "--zone=z", "--type=v5litepod-16"], "gke": ["--image=i"]}
FAKE = """#!{python}
import json, os, sys
from pathlib import Path
name, here = Path(sys.argv[0]).name, Path(__file__).parent
told = {{"program": name, "arguments": sys.argv[1:], "input": sys.stdin.read() if sys.argv[-2:] == ["-f", "-"] else ""}}
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(told) + "\\n")
for answers in sorted(here.glob("*.answers")):
    if all(word in " ".join(sys.argv) for word in answers.stem.split(",")):
        first, _, rest = answers.read_text().partition("\\n")
        answers.write_text(rest)
        if first:
            print(first)
        break
"""


class Fakes:
    """Programs that only write down how they were called, and answer what a test has them answer, a line for each call."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        for name in ("gcloud", "kubectl", "sbatch", "ssh", "rsync", "scontrol", "srun"):
            (folder / name).write_text(FAKE.format(python=sys.executable))
            (folder / name).chmod(0o755)

    def answer(self, words: str, *lines: str) -> None:
        (self.folder / f"{words}.answers").write_text("\n".join(lines))

    def run(self, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [str(HERE / f"{script}.sh"), *arguments],
            env={**os.environ, "PATH": path, "POLL_S": "0", **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[dict[str, Any]]:
        log = self.folder / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path / "bin")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_sound_shell(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and os.access(path, os.X_OK), done.stderr
    checker = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if not checker:
        pytest.skip("bash finds no fault; shellcheck is not installed (the extra `test` has it)")
    done = subprocess.run([checker, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_a_dry_run_prints_what_would_be_called_and_calls_nothing(script: str, fakes: Fakes) -> None:
    done = fakes.run(script, "--dry-run", *OWN.get(script, []), "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert fakes.calls == []
    said = (done.stdout + done.stderr).replace("\\", "")
    verb = {"tpu-pod": "gcloud compute tpus", "gke": "kubectl apply", "slurm": "sbatch"}.get(script, "train")
    assert "distance=(1" in said and verb in said


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_a_run_points_at_a_fleet_of_sandboxes_through_every_script_as_it_is(script: str, fakes: Fakes, tmp_path: Path) -> None:
    fleet = ["--config=configs/maze.py", "--workdir=/runs/x", "--config.sandbox.url=launch/fleets/sandbox-server.toml"]
    fake = tmp_path / "jaxagent"
    fake.write_text(
        f"#!{sys.executable}\nimport json, sys\nopen({str(tmp_path / 'told')!r}, 'w').write(json.dumps(sys.argv))\n"
    )
    fake.chmod(0o755)
    if script == "gpu-box":
        (fakes.folder / "ssh").write_text(
            f'#!/bin/bash\n[[ $* == *"jaxagent train"* ]] && echo "$2" > {tmp_path}/said\nexit 0\n'
        )
        assert fakes.run(script, "--host=me@box", "--", *fleet).returncode == 0
        found = trained((tmp_path / "said").read_text())
    elif script == "tpu-pod":
        fakes.answer("describe", "ACTIVE", "ACTIVE")
        fakes.answer("jaxagent,code,worker=0", "0")
        assert fakes.run(script, *OWN[script], "--", *fleet).returncode == 0
        found = next(trained(word) for one in fakes.calls for word in one["arguments"] if "jaxagent train" in word)
    else:
        more = {"JAXAGENT": str(fake)} if script == "local" else {}
        assert fakes.run(script, *OWN.get(script, []), "--", *fleet, **more).returncode == 0
        if script == "local":
            found = json.loads((tmp_path / "told").read_text())[-3:]
        elif script == "slurm":
            found = trained(fakes.calls[0]["arguments"][-1].removeprefix("--wrap="))
        else:
            pod = yaml.safe_load(fakes.calls[1]["input"])["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            found = pod["containers"][0]["args"]
    assert found[:3] == fleet
    config, faults = load(str(HERE.parent / "configs" / "maze.py"), [fleet[2].removeprefix("--config.")])
    assert not faults and (HERE.parent / config.sandbox.url).is_file()


def test_launchers_wait_longer_after_sigterm_than_a_run_takes_to_save() -> None:
    job = yaml.safe_load((HERE / "gke-jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > SAVE_S
    (notice,) = re.findall(r"--signal=TERM@(\d+)", (HERE / "slurm.sh").read_text())
    assert int(notice) > SAVE_S


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_what_is_unknown_or_missing_is_said_before_anything_is_called(script: str, fakes: Fakes) -> None:
    done = fakes.run(script, "--nodse=3", "--", *TRAIN)
    assert done.returncode == 2 and "unknown: --nodse=3" in done.stderr
    assert fakes.run(script, *OWN.get(script, [])).returncode == 2
    assert fakes.calls == []


def trained(command: str) -> list[str]:
    """The arguments of `jaxagent train` in a shell command."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith("jaxagent") and words[i + 1] == "train")
    return [word.removesuffix(";") for word in words[at + 2 : at + 2 + len(TRAIN)]]


def test_slurm_gets_one_task_a_node_with_all_its_gpus_and_queues_again_what_was_saved(fakes: Fakes) -> None:
    assert fakes.run("slurm", "--nodes=4", "--gpus=2", "--sbatch=--partition=p", "--", *TRAIN).returncode == 0
    (call,) = fakes.calls
    *options, wrap = call["arguments"]
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=2", "--partition=p", "--requeue", "--signal=TERM@120"} <= set(
        options
    )
    job = wrap.removeprefix("--wrap=")
    assert job.startswith("JAX_LOCAL_DEVICE_IDS=0,1 srun --kill-on-bad-exit=0") and trained(job) == TRAIN
    for code, again in ((75, 1), (1, 0)):
        script = job.replace("srun", f"sh -c 'exit {code}' --", 1)
        before = len(fakes.calls)
        path = f"{fakes.folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["bash", "-c", script], env={**os.environ, "PATH": path, "SLURM_JOB_ID": "17"}, check=False)
        assert done.returncode == code
        assert [one["arguments"] for one in fakes.calls[before:]] == [["requeue", "17"]] * again


def test_a_slice_is_asked_for_used_again_after_a_save_and_asked_for_anew_when_it_was_taken(fakes: Fakes) -> None:
    fakes.answer("describe", "", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "SUSPENDED", "SUSPENDED", "", "ACTIVE", "ACTIVE")
    fakes.answer("jaxagent,code,worker=0", "75", "", "0")
    done = fakes.run("tpu-pod", *OWN["tpu-pod"], "--spot", "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    calls = [one["arguments"][2:] for one in fakes.calls]
    assert all(one["arguments"][:2] == ["compute", "tpus"] for one in fakes.calls)
    verbs = [call[1] for call in calls]
    created = [call for call in calls if call[1] == "create"]
    assert len(created) == 2 and all("--spot" in call and "--accelerator-type=v5litepod-16" in call for call in created)
    assert verbs.count("delete") == 1 and verbs.index("delete") > verbs.index("create")
    commands = [word.removeprefix("--command=") for call in calls for word in call if word.startswith("--command=")]
    training = [command for command in commands if "jaxagent train" in command]
    assert len(training) == 3 and all(trained(command) == TRAIN for command in training)
    workers = [word for call in calls if call[1] == "ssh" for word in call if word.startswith("--worker=")]
    assert workers == ["--worker=all", "--worker=all", "--worker=0"] * 3


def test_a_share_is_mounted_on_every_host_before_anything_is_installed(fakes: Fakes) -> None:
    fakes.answer("describe", "ACTIVE", "ACTIVE")
    fakes.answer("jaxagent,code,worker=0", "0")
    assert fakes.run("tpu-pod", *OWN["tpu-pod"], "--nfs=10.0.0.2:/share", "--", *TRAIN).returncode == 0
    words = [one["arguments"] for one in fakes.calls if "ssh" in one["arguments"] or "scp" in one["arguments"]]
    mounting = words[0]
    assert "--worker=all" in mounting
    (command,) = [word for word in mounting if word.startswith("--command=")]
    assert "-S 10.0.0.2:/share /runs" in command and "mount -t nfs 10.0.0.2:/share /runs" in command
    assert "[ -w /runs ] || sudo chown $USER /runs" in command
    assert "scp" in words[1]
    done = fakes.run("tpu-pod", *OWN["tpu-pod"], "--nfs=10.0.0.2:/a; rm -r", "--", *TRAIN)
    assert done.returncode == 2 and "--nfs=SERVER:/SHARE wanted, got 10.0.0.2:/a; rm -r" in done.stderr


def test_a_slice_that_failed_to_train_is_not_asked_for_again(fakes: Fakes) -> None:
    fakes.answer("describe", "ACTIVE", "ACTIVE")
    fakes.answer("jaxagent,code,worker=0", "2")
    assert fakes.run("tpu-pod", *OWN["tpu-pod"], "--", *TRAIN).returncode == 2
    assert not [one for one in fakes.calls if "create" in one["arguments"]]


def test_the_job_in_gke_is_filled_in_and_applied_anew(fakes: Fakes) -> None:
    asked = ["--image=r/i:1", "--hosts=64", "--topology=16x16", "--accelerator=tpu-v6e-slice"]
    assert fakes.run("gke", *asked, "--", *TRAIN).returncode == 0
    delete, apply = fakes.calls
    assert delete["arguments"][:2] == ["delete", "jobset/jaxagent"] and apply["arguments"] == ["apply", "-f", "-"]
    filled = yaml.safe_load(apply["input"])
    assert faults(filled) == []
    job = filled["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["parallelism"] == job["completions"] == 64 and container["image"] == "r/i:1" and container["args"] == TRAIN
    assert set(pod["nodeSelector"].values()) == {"16x16", "tpu-v6e-slice"}
    assert {one["name"]: one.get("value") for one in container["env"]}["JAX_NUM_PROCESSES"] == "64"


def test_the_jobset_has_the_shape_of_its_kind_and_its_pods_find_each_other() -> None:
    (one,) = yaml.safe_load_all((HERE / "gke-jobset.yaml").read_text())
    assert faults(one) == []
    # What ends with 2 hangs every time, or is for a user to mend: it is not started again, and all else is.
    (rule,) = one["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (group,) = one["spec"]["replicatedJobs"]
    (ends,) = group["template"]["spec"]["podFailurePolicy"]["rules"]
    assert ends["action"] == "FailJob" and ends["onExitCodes"]["values"] == [STUCK]
    assert ends["onExitCodes"]["containerName"] == group["template"]["spec"]["template"]["spec"]["containers"][0]["name"]
    job, pod = group["template"]["spec"], group["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    told = {one["name"]: one for one in container["env"]}
    # The first pod of a job has this name in the headless service of its JobSet.
    name, port = told["JAX_COORDINATOR_ADDRESS"]["value"].split(":")
    assert name == f"{one['metadata']['name']}-{group['name']}-0-0.{one['metadata']['name']}"
    assert int(port) == container["ports"][0]["containerPort"]
    assert int(told["JAX_NUM_PROCESSES"]["value"]) == job["completions"] == job["parallelism"]
    assert told["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"].endswith("job-completion-index']")
    assert job["completionMode"] == "Indexed" and container["resources"]["limits"] == container["resources"]["requests"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    changes = [word for word in container["args"] if word.startswith("--config.")]
    options = vars(parser().parse_args([*container["command"][1:], *(w for w in container["args"] if w not in changes)]))
    assert options["workdir"].startswith(container["volumeMounts"][0]["mountPath"])
    config, unfit = load(str(HERE.parent / options["config"]), [word.removeprefix("--config.") for word in changes])
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert not unfit and chips == job["completions"] * container["resources"]["limits"]["google.com/tpu"]
    assert not config.learner.batch_rows % chips  # else no mesh of these chips takes the rows


def test_the_job_within_is_valid_to_kubernetes_own_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    one = yaml.safe_load((HERE / "gke-jobset.yaml").read_text())
    template = one["spec"]["replicatedJobs"][0]["template"]
    validate.validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, **template}, "1.31", strict=True)


def test_processes_of_this_machine_get_their_numbers_and_the_first_says_how_it_ended(tmp_path: Path) -> None:
    fake = tmp_path / "jaxagent"
    fake.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/$$.told\n[ "$4" = --process=0 ] || exit 0\n'
        f"echo x >> {tmp_path}/runs\n[ $(wc -l < {tmp_path}/runs) -lt 3 ] && exit 75\nexit 3\n"
    )
    fake.chmod(0o755)
    run = subprocess.run(
        [str(HERE / "local.sh"), "--processes=3", "--port=9", "--", *TRAIN],
        env={**os.environ, "JAXAGENT": str(fake)},
        check=False,
    )
    assert run.returncode == 3  # after it had saved twice and was started again
    told = sorted(path.read_text().splitlines() for path in tmp_path.glob("*.told"))
    first = ["train", "--coordinator=127.0.0.1:9", "--processes=3"]
    assert told == sorted([*first, f"--process={i}", *TRAIN] for i in (0, 1, 2) * 3)


def test_a_signal_to_the_script_is_one_to_all_its_processes(tmp_path: Path) -> None:
    fake = tmp_path / "jaxagent"
    fake.write_text(
        f"#!{sys.executable}\nimport signal, sys, time\nfrom pathlib import Path\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"Path({str(tmp_path)!r}, sys.argv[4][-1]).touch()\ntime.sleep(60)\n"
    )
    fake.chmod(0o755)
    script = subprocess.Popen([str(HERE / "local.sh"), "--", "--config=c"], env={**os.environ, "JAXAGENT": str(fake)})
    deadline = time.monotonic() + 60
    while not all((tmp_path / str(i)).exists() for i in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 75


def test_a_box_with_gpus_is_prepared_once_and_trained_on_again_after_a_save(fakes: Fakes) -> None:
    counter = fakes.folder / "runs"
    (fakes.folder / "ssh").write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$*" >> {fakes.folder}/said\n[[ $* == *"jaxagent train"* ]] || exit 0\n'
        f"echo x >> {counter}\n(( $(wc -l < {counter}) < 3 )) && exit 75\nexit 3\n"
    )
    done = fakes.run("gpu-box", "--host=me@box", "--dir=there", "--", *TRAIN)
    assert done.returncode == 3
    said = (fakes.folder / "said").read_text().splitlines()
    assert [call["program"] for call in fakes.calls] == ["rsync"] and "me@box:there/" in fakes.calls[0]["arguments"]
    assert sum("nvidia-smi" in line for line in said) == sum("venv" in line and "pip" in line for line in said) == 1
    training = [line for line in said if "jaxagent train" in line]
    assert len(training) == 3 and all(trained(line) == TRAIN for line in training)


def test_the_readme_names_every_script() -> None:
    text = (HERE / "README.md").read_text()
    assert [path.name for path in SCRIPTS if not re.search(rf"`(launch/)?{path.name}", text)] == []
