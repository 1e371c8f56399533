"""Hosts that wait for every kernel (CUDA_LAUNCH_BLOCKING): their time is no longer behind the device's."""

import pytest

from meshwright.cost.stacks import SOFTWARE, software
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ConfigError
from meshwright.spec.report import LineName
from tests.cost.cost_examples import llama
from tests.cost.test_stacks import WIDE, seconds

LAYERS = WIDE["layers"]


def test_any_software_may_wait_for_kernels_and_then_nothing_travels_beside_work():
    for name, plain in SOFTWARE.items():
        waiting = software(f"{name}-blocking")
        assert waiting.host_in_turn(DeviceKind.CUDA)
        assert plain.host_in_turn(DeviceKind.CPU)
        assert not plain.host_in_turn(DeviceKind.CUDA)
        assert not any(getattr(waiting, each) for each in ("overlap", "hides_gradients", "pieces", "hides_experts"))
        assert waiting.layer_seconds == plain.layer_seconds
    assert software("megatron-core-blocking:mlp").repeats == software("megatron-core:mlp").repeats
    for unknown in ("-blocking", "torch-blocking-blocking", "torch-blocking:mlp"):
        with pytest.raises(ConfigError):
            software(unknown)


def test_host_time_comes_on_top_where_it_had_been_hidden():
    """Forward and backward of every layer are longer by one host time each, and by what starting kernels takes."""
    hidden, shown = (
        seconds(llama(**WIDE), software=name, microbatch=4) for name in ("megatron-flash", "megatron-flash-blocking")
    )
    lines = [
        (before.seconds, after.seconds)
        for name in (LineName.FORWARD, LineName.BACKWARD)
        for before, after in [(hidden.step.find(name), shown.step.find(name))]
        if before and after
    ]
    microbatches = shown.tokens_per_step / (shown.devices * 4 * 4096)
    host = LAYERS * microbatches * SOFTWARE["megatron-flash"].layer_seconds
    assert len(lines) == 2
    assert all(host < after - before < 1.5 * host for before, after in lines)


@pytest.mark.parametrize("name", ["torch", "megatron-2021", "megatron-core", "nemo"])
def test_waiting_never_quickens_a_step_and_small_layers_most(name):
    small, large = llama(width=256, hidden=512, layers=8, vocab=1024), llama(**WIDE)
    slower = [
        seconds(model, software=f"{name}-blocking", microbatch=2).step_seconds
        / seconds(model, software=name, microbatch=2).step_seconds
        for model in (large, small)
    ]
    assert 1.0 < slower[0] < slower[1]
