"""Manifests: of Kubernetes against the schema of JobSets, of SkyPilot and dstack against their documented fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshwright.run.launching import dstack, kubernetes, skypilot
from meshwright.run.launching.ask import Place
from meshwright.run.launching.shares import shares
from meshwright.run.launching.start import document
from meshwright.run.launching.yaml_text import yaml_text
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import ElasticBackend, ElasticSpec
from meshwright.spec.plan import Design
from tests.run.launching.made import FAR, ask, on_gpus, on_processors
from tests.run.launching.schema import problems
from tests.run.runs import design
from tests.support.designs import Layout

JOBSET = json.loads((Path(__file__).parent / "jobset.json").read_text())["schema"]
# docs.skypilot.co/en/latest/reference/yaml-spec.html, and sky/utils/schemas.py.
SKYPILOT = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "volumes", "setup", "run"}
SKYPILOT |= {"config", "service", "event_callback", "pool"}
SKYPILOT_RESOURCES = {"infra", "accelerators", "cpus", "memory", "instance_type", "use_spot", "disk_size", "disk_tier"}
SKYPILOT_RESOURCES |= {"network_tier", "image_id", "ports", "labels", "autostop", "any_of", "ordered", "job_recovery"}
SKYPILOT_RECOVERY = {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
# dstack.ai/docs/reference/dstack.yml/task, and dstack/_internal/core/models.
DSTACK = {"type", "name", "nodes", "image", "python", "env", "files", "commands", "volumes", "resources", "working_dir"}
DSTACK |= {"retry", "max_duration", "stop_duration", "backends", "regions", "spot_policy", "max_price", "shell"}
DSTACK_RESOURCES = {"cpu", "memory", "gpu", "shm_size", "disk"}


def jobset(made: Design, **asked: Any) -> dict[str, Any]:
    """The JobSet, read back from the text and found fit by its schema."""
    found = kubernetes.manifest(made, ask("kubernetes", **{**FAR, **asked}), found=shares(made), grace=150)
    config, read = yaml.safe_load_all(found)
    assert codec.decode(Design, json.loads(config["data"]["design.json"])) == made
    assert not list(problems(read, JOBSET))
    return read


def pods(read: dict[str, Any]) -> list[dict[str, Any]]:
    return [job["template"]["spec"]["template"]["spec"] for job in read["spec"]["replicatedJobs"]]


def test_a_jobset_has_a_pod_for_each_node(tmp_path: Path) -> None:
    read = jobset(on_gpus(tmp_path), namespace="training")
    assert read["metadata"] == {"name": "first-run", "namespace": "training"}
    (job,), (pod,) = read["spec"]["replicatedJobs"], pods(read)
    assert (job["template"]["spec"]["completions"], job["template"]["spec"]["parallelism"]) == (2, 2)
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["image"] == FAR["image"]
    words = container["command"]
    assert words[words.index("--head") + 1] == "first-run-nodes0-0-0.first-run:29500"
    assert words[words.index("--session") + 1] == "first-run-$(MESHWRIGHT_ATTEMPT)"
    assert words[words.index("--node") + 1] == "JOB_COMPLETION_INDEX"
    assert read["spec"]["network"]["subdomain"] == "first-run"
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert pod["terminationGracePeriodSeconds"] == 150


def test_a_saved_run_is_begun_anew_as_often_as_need_be_and_a_failed_one_not(tmp_path: Path) -> None:
    read = jobset(on_gpus(tmp_path), restarts=5)
    policy = read["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 5
    assert [rule["action"] for rule in policy["rules"]] == ["RestartJobSetAndIgnoreMaxRestarts"]
    (job,) = read["spec"]["replicatedJobs"]
    saved, put_out = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert saved["onExitCodes"] == {"containerName": "meshwright", "operator": "In", "values": [75]}
    assert put_out["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert [pod["restartPolicy"] for pod in pods(read)] == ["Never"]


def test_unlike_nodes_are_jobs_of_their_own_numbered_on(tmp_path: Path) -> None:
    read = jobset(on_gpus(tmp_path, "A100", "MI300X"))
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods(read)]
    assert limits == [{"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 1}]
    words = [pod["containers"][0]["command"] for pod in pods(read)]
    assert "--first-node" not in words[0]
    assert words[1][words[1].index("--first-node") + 1] == "1"
    assert {word[word.index("--nodes") + 1] for word in words} == {"2"}


def test_processors_are_asked_for_by_cores_and_memory(tmp_path: Path) -> None:
    (pod,) = pods(jobset(on_processors(tmp_path)))
    assert pod["containers"][0]["resources"].keys() == {"requests"}
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "2"


def test_the_schema_refuses_what_is_wrong(tmp_path: Path) -> None:
    read = jobset(on_gpus(tmp_path))
    read["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    read["spec"]["network"]["dns"] = True
    pod = pods(read)[0]
    del pod["containers"][0]["name"]
    pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "one"
    pod["terminationGracePeriodSeconds"] = "150"
    assert len(list(problems(read, JOBSET))) == 5


def test_a_task_of_skypilot_has_its_fields_alone(tmp_path: Path) -> None:
    made, asked = on_gpus(tmp_path), ask("skypilot", **FAR, restarts=2)
    read = yaml.safe_load(skypilot.task(asked, found=shares(made)))
    assert read.keys() <= SKYPILOT
    assert read["resources"].keys() <= SKYPILOT_RESOURCES
    assert read["resources"]["job_recovery"].keys() <= SKYPILOT_RECOVERY
    assert (read["num_nodes"], read["resources"]["accelerators"]) == (2, "H100:1")
    assert read["resources"]["job_recovery"] == {"max_restarts_on_errors": 2, "recover_on_exit_codes": [75]}
    assert read["volumes"] == {"/mnt": "training"}
    assert '--head "$head:29500"' in read["run"]
    assert read["run"].startswith('head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\nexec python -m ')
    assert read["file_mounts"] == {"/tmp/meshwright-design.json": "./first-run.design.json"}
    here = yaml.safe_load(skypilot.task(asked, found=shares(on_processors(tmp_path))))
    assert here["resources"]["cpus"] == "2+"
    assert "network_tier" not in here["resources"]


def test_several_nodes_of_accelerators_ask_skypilot_for_the_network_that_is_predicted(tmp_path: Path) -> None:
    found = shares(on_gpus(tmp_path))
    assert skypilot.document(ask("skypilot", **FAR), found=found)["resources"]["network_tier"] == "best"
    assert "network_tier" not in skypilot.document(ask("skypilot", **FAR), found=found[:1])["resources"]


@pytest.mark.parametrize("made", [on_gpus, on_processors])
def test_workers_of_dstack_have_shared_memory(made: Callable[[Path], Design], tmp_path: Path) -> None:
    found = dstack.document(ask("dstack", **FAR), found=shares(made(tmp_path)), grace=150)
    assert found["resources"]["shm_size"] == "4GB"


def test_one_volume_for_several_nodes_of_dstack_is_noted(tmp_path: Path) -> None:
    asked = ask("dstack", **FAR)
    (_, told) = document(on_gpus(tmp_path), asked).notes
    assert "all 2 nodes mount the volume training" in told
    assert "write `- HOST-FOLDER:/mnt` under volumes" in told
    assert dstack.volume_notes(asked, nodes=1) == ()


def test_pods_on_a_plain_network_are_noted(tmp_path: Path) -> None:
    (_, told) = document(on_gpus(tmp_path), ask("kubernetes", **FAR)).notes
    assert all(word in told for word in ("rdma/ib", "IPC_LOCK", "hostNetwork"))
    assert len(document(on_processors(tmp_path), ask("kubernetes", **FAR)).notes) == 1
    assert kubernetes.notes(on_gpus(tmp_path), nodes=1) == ()


def test_the_design_of_a_jobset_has_no_idle_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_gpus(tmp_path)
    text = kubernetes.documents(made, ask("kubernetes", **FAR), found=shares(made), grace=150)[0]["data"]["design.json"]
    assert len(text.splitlines()) == 1
    assert '": ' not in text
    monkeypatch.setattr(kubernetes, "_APPLIED_BYTES", len(text))
    assert any("kubectl apply --server-side" in note for note in kubernetes.notes(made, nodes=1))


def test_a_task_of_dstack_has_its_fields_alone(tmp_path: Path) -> None:
    made, asked = on_gpus(tmp_path), ask("dstack", **FAR, time_seconds=7200.0)
    read = yaml.safe_load(dstack.task(asked, found=shares(made), grace=150))
    assert read.keys() <= DSTACK
    assert read["resources"].keys() <= DSTACK_RESOURCES
    assert (read["type"], read["nodes"], read["resources"]["gpu"]) == ("task", 2, "H100:1")
    assert (read["max_duration"], read["stop_duration"]) == ("7200s", "150s")
    assert read["retry"]["on_events"] == ["no-capacity", "interruption", "error"]
    assert read["volumes"] == [{"name": "training", "path": "/mnt"}]
    (command,) = read["commands"]
    assert '--head "$DSTACK_MASTER_NODE_IP:29500"' in command
    assert command.endswith("--stop-after 7050")


@pytest.mark.parametrize(
    ("device", "sky", "at_dstack"),
    [
        ("A100", "A100-80GB:1", "A100:80GB:1"),
        ("A100-40GB", "A100:1", "A100:40GB:1"),
        ("RTX-4090", "RTX4090:1", "RTX4090:1"),
    ],
)
def test_accelerators_have_each_place_s_own_names(device: str, sky: str, at_dstack: str, tmp_path: Path) -> None:
    found = shares(on_gpus(tmp_path, device))[1:]
    assert skypilot.document(ask("skypilot", **FAR), found=found)["resources"]["accelerators"] == sky
    assert dstack.document(ask("dstack", **FAR), found=found, grace=60)["resources"]["gpu"] == at_dstack


def test_an_accelerator_that_is_half_of_one_has_no_name(tmp_path: Path) -> None:
    found = shares(on_gpus(tmp_path, "MI250X"))[1:]
    with pytest.raises(ConfigError, match="SkyPilot has no accelerator of the name 'MI250X-GCD'"):
        skypilot.task(ask("skypilot", **FAR), found=found)


@pytest.mark.parametrize("place", [Place.KUBERNETES, Place.SKYPILOT, Place.DSTACK])
def test_files_of_this_machine_are_no_files_there(place: Place, tmp_path: Path) -> None:
    made = on_processors(tmp_path)
    near = _with_source(made, "text.jsonl")
    with pytest.raises(ConfigError, match=r"job.data.sources\[0\].path: 'text.jsonl' is not from the root"):
        document(near, ask(place.value, **FAR))
    assert document(made, ask(place.value, **FAR)).nodes == 2


def _with_source(made: Design, path: str) -> Design:
    told = codec.encode(made)
    told["job"]["data"]["sources"][0]["path"] = path
    return codec.decode(Design, told)


def test_what_lies_beside_a_task_is_its_design(tmp_path: Path) -> None:
    made = on_processors(tmp_path)
    shown = document(made, ask("dstack", **FAR))
    assert shown.name == "first-run.dstack.yml"
    assert codec.decode(Design, json.loads(shown.beside["first-run.design.json"])) == made


TEXT = st.text(alphabet="ab \n:#-'\"{}[]%@,é1.0eyn~|>&*!", max_size=12) | st.sampled_from(
    ["no", "0x1", "1e3", ".5", ""]
)
LEAF = TEXT | st.integers() | st.booleans()
NESTED = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@given(st.dictionaries(TEXT, NESTED, min_size=1, max_size=4))
def test_yaml_is_read_back_as_it_was(value: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


@pytest.mark.parametrize(("place", "more"), [("ssh", {"hosts": ("a",)}), ("slurm", {}), ("kubernetes", FAR)])
def test_replicas_under_torchft_are_started_here_alone(place: str, more: dict[str, Any], tmp_path: Path) -> None:
    spec = ElasticSpec(min_ranks=1, backend=ElasticBackend.TORCHFT)
    made = design(tmp_path, Layout(replicate=2, batch=8), steps=4, elastic=spec)
    with pytest.raises(ConfigError, match=f"--on {place} does not start replicas under torchft"):
        document(made, ask(place, **more))
    assert document(made, ask("local")).nodes == 1


@pytest.mark.parametrize("place", ["kubernetes", "skypilot", "dstack"])
def test_places_that_start_all_again_are_none_for_elastic_runs(place: str, tmp_path: Path) -> None:
    made = on_processors(tmp_path, elastic=ElasticSpec(min_ranks=1))
    with pytest.raises(ConfigError, match=f"--on {place} starts all nodes again when one is lost"):
        document(made, ask(place, **FAR))
