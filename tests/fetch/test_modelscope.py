"""What ModelScope's protocol has of its own: where it is, logins, files that lie elsewhere, connections that break."""

from pathlib import Path

import pytest

from mindllm.errors import RunFailed, UserError
from mindllm.fetch import hub as requests
from mindllm.fetch import modelscope
from mindllm.fetch.directory import fetch
from mindllm.fetch.modelscope import ModelScope

pytest.importorskip("httpx")

from local_hub import local_hub

WEIGHTS = bytes(range(256)) * 200


@pytest.fixture
def hub(monkeypatch):
    with local_hub() as hub:
        hub.files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
        for variable in ("MODELSCOPE_DOMAIN", "MODELSCOPE_API_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        monkeypatch.setattr(requests.time, "sleep", lambda seconds: None)
        yield hub


def fetched(tmp_path):
    return (
        fetch(ModelScope(), ModelScope().list_files("org/model"), tmp_path / "model") / "model.safetensors"
    ).read_bytes()


def pieces(hub):
    return [piece for _, path, piece in hub.requests if path.endswith("model.safetensors")]


def test_the_hubs_own_client_reads_the_same_files_from_the_local_server(hub, tmp_path, monkeypatch):
    client = pytest.importorskip("modelscope_hub")
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    config = client.HubConfig(endpoint=hub.url, token="", cache_dir=tmp_path / "cache", config_dir=tmp_path / "home")
    api = client.HubApi(config)
    theirs = {
        (file.path, file.size, file.sha256) for file in api.list_repo_files("org/model", "model") if not file.is_dir
    }
    ours = ModelScope().list_files("org/model").files
    assert theirs == {(file.name, file.size, file.sha256) for file in ours}
    path = api.download_file("org/model", "model", "model.safetensors", local_dir=tmp_path / "theirs")
    assert fetched(tmp_path) == Path(path).read_bytes() == WEIGHTS


def test_a_broken_connection_is_continued_where_it_was(hub, tmp_path):
    hub.breaks["model.safetensors"] = 20_000
    assert fetched(tmp_path) == WEIGHTS
    assert pieces(hub) == [None, "bytes=20000-"]


def test_a_busy_hub_is_asked_again_and_not_for_ever(hub, tmp_path):
    hub.busy = 3
    assert fetched(tmp_path) == WEIGHTS
    hub.busy = 1000
    with pytest.raises(RunFailed, match=r"org/model: http://127.*answers: 503"):
        fetch(ModelScope(), ModelScope().list_files("org/model"), tmp_path / "other")
    assert hub.busy == 1000 - requests.MAX_TRIES


def test_what_had_all_its_bytes_when_it_was_killed_is_not_asked_for(hub, tmp_path):
    listing = ModelScope().list_files("org/model")
    (weights,) = (file for file in listing.files if file.name == "model.safetensors")
    kept = tmp_path / ".model.fetch"
    kept.mkdir()
    (kept / f"model.safetensors.{weights.sha256[:16]}.incomplete").write_bytes(WEIGHTS)
    assert fetched(tmp_path) == WEIGHTS
    assert pieces(hub) == []


def test_a_login_is_sent_to_the_hub_and_not_to_where_files_lie(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-secret")
    with local_hub() as elsewhere:
        elsewhere.files, hub.elsewhere = hub.files, elsewhere.url
        assert fetched(tmp_path) == WEIGHTS
        assert elsewhere.logins == [(None, None)]
    assert set(hub.logins) == {("Bearer ms-secret", "m_session_id=ms-secret")}


def test_files_without_a_checksum_are_named(hub, tmp_path):
    hub.checksums = False
    assert ModelScope().list_files("org/model").unchecked == ["config.json", "model.safetensors"]
    hub.served["model.safetensors"] = WEIGHTS + b"more"
    with pytest.raises(RunFailed, match=r"sends more than the 51,200 bytes of model.safetensors that it lists"):
        fetched(tmp_path)


def test_a_list_that_may_have_been_cut_is_refused(hub):
    hub.files = {f"{number}.json": b"" for number in range(modelscope.MAX_LISTED)}
    with pytest.raises(UserError, match="there may be more"):
        ModelScope().list_files("org/model")


def test_it_is_asked_through_a_proxy(hub, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://modelscope.invalid")
    for variable in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("http_proxy", hub.url)
    assert [file.name for file in ModelScope().list_files("org/model").files] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "https://modelscope.cn"),
        ({"MODELSCOPE_DOMAIN": "www.modelscope.ai"}, "https://www.modelscope.ai"),
        ({"MODELSCOPE_DOMAIN": "a", "MODELSCOPE_ENDPOINT": "http://b:1/"}, "http://b:1"),
    ],
)
def test_where_it_is(variables, wanted, monkeypatch):
    for name in ("MODELSCOPE_DOMAIN", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, variables.get(name, ""))
    assert ModelScope().endpoint == wanted


def test_a_timeout_that_is_none_is_refused(hub, monkeypatch):
    monkeypatch.setenv("MODELSCOPE_DOWNLOAD_TIMEOUT", "soon")
    with pytest.raises(
        UserError, match=r"MODELSCOPE_DOWNLOAD_TIMEOUT: must be a number of seconds above 0 .value soon"
    ):
        ModelScope().list_files("org/model")
