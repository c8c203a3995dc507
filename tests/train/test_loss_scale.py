"""The loss scale follows MindSpore's rule, bounded below by 1."""

from hypothesis import given
from hypothesis import strategies as st

from mindllm.config.optimizer import DynamicLossScale, FixedLossScale
from mindllm.train.optimizers.loss_scale import LossScaler


def dynamic(value=16.0, window=3):
    return LossScaler(
        DynamicLossScale(type="DynamicLossScaleUpdateCell", loss_scale_value=value, scale_factor=2, scale_window=window)
    )


def test_overflow_halves_and_a_window_of_good_steps_doubles():
    scaler = dynamic()
    scaler.update(overflow=True)
    assert scaler.value == 8.0
    for _ in range(3):
        scaler.update(overflow=False)
    assert scaler.value == 16.0


def test_an_overflow_starts_the_window_again():
    scaler = dynamic()
    for overflow in (False, False, True, False, False):
        scaler.update(overflow)
    assert scaler.value == 8.0
    scaler.update(overflow=False)
    assert scaler.value == 16.0


@given(st.lists(st.booleans(), max_size=200))
def test_the_scale_is_never_below_one_and_stops_being_curable_there(overflows):
    scaler = dynamic(value=4.0)
    for overflow in overflows:
        scaler.update(overflow)
        assert scaler.value >= 1.0
        assert scaler.can_fall == (scaler.value > 1.0)


@given(st.lists(st.booleans(), max_size=50), st.lists(st.booleans(), max_size=50))
def test_a_restored_scaler_goes_on_as_the_saved_one(before, after):
    scaler, other = dynamic(), dynamic()
    for overflow in before:
        scaler.update(overflow)
    other.load(scaler.state())
    for overflow in after:
        scaler.update(overflow)
        other.update(overflow)
    assert other.state() == scaler.state()


def test_fixed_scales_stay():
    for scaler in (LossScaler(1.0), LossScaler(FixedLossScale(type="FixedLossScaleUpdateCell", loss_scale_value=64))):
        value = scaler.value
        scaler.update(overflow=True)
        assert scaler.value == value
        assert not scaler.can_fall
