"""The process around a compile: ranks that do not exist, other versions of MindSpore, errors without their stacks."""

import pytest
from small_cluster import cluster_run

from mindllm.compiled.device import front_end
from mindllm.compiled.rank import compile_rank as subject
from mindllm.errors import UserError
from mindllm.parallel.refusals import CompileFailed


def test_a_rank_that_does_not_exist():
    with pytest.raises(UserError, match="rank 4 does not exist: the configuration has 4 devices, 0 to 3"):
        subject.compile_rank(cluster_run(dp=2, tp=2), 4)


def test_another_version_of_mindspore_is_refused(monkeypatch):
    import mindspore

    monkeypatch.setattr(mindspore, "__version__", "2.3.0")
    with pytest.raises(front_end.FrontEndUnavailable, match=r"verified with MindSpore .*, not 2\.3\.0; pip install"):
        front_end._require_version()


def test_the_environment_must_be_set_before_mindspore_is_imported(monkeypatch):
    monkeypatch.delenv("RANK_ID", raising=False)
    with pytest.raises(RuntimeError, match="RANK_ID must be 0"):
        front_end.pretend_device(0, 2)


def test_what_the_user_did_wrong_comes_back_as_such():
    config = cluster_run(tp=2, recompute_config={"select_recompute": [r"feed_forward\.w9\.matmul"]})
    with pytest.raises(
        UserError, match=r"recompute_config\.select_recompute: pattern .*w9.* matches no operator"
    ) as error:
        subject.compile_rank(config, 0)
    assert "Traceback" not in str(error.value)


def test_a_compile_that_takes_too_long():
    with pytest.raises(CompileFailed, match="took longer than 0 s"):
        subject.compile_rank(cluster_run(tp=2), 0, timeout=0.1)


def test_the_depth_of_calls_is_the_one_of_the_configuration():
    """A model of 28 layers on 16 stages (DeepSeek-V2 236B as it is checked) needs more than MindSpore's own limit of 1000."""
    with pytest.raises(CompileFailed, match="depth limit 20"):
        subject.compile_rank(cluster_run(dp=2, context={"max_call_depth": 20}), 0)
