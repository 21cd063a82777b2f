"""load(): what comes out, what it reports on the way, and what it says when it cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    edit_json,
    gguf_metadata,
    gguf_tensors,
    reference,
    save_folder,
    save_gguf,
    write_gguf,
)

import kvchat
from kvchat.engine.cuda.int4 import TiledInt4Linear
from kvchat.engine.errors import (
    ContextOverflowError,
    GenerationError,
    KvchatError,
    ModelFileError,
    ModelNotFoundError,
    SettingError,
    TemplateError,
    TokenizerError,
    UnsupportedModelError,
)
from kvchat.engine.linear import Int4Linear, Int8Linear, Linear
from kvchat.engine.static_step import StaticStep
from kvchat.engine.types import LoadProgress, SamplingParams
from kvchat.models.gguf import GGUFFile
from kvchat.models.gguf_weights import GGUFWeights
from kvchat.models.load import LanguageModel, author_settings, pick_device, pick_dtype, pick_quant
from kvchat.models.template import Message
from kvchat.models.weights import build_transformer

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(reference("llama3"), tmp_path / "model")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return save_gguf(reference("llama3"), tmp_path / "model.gguf", "Q4_1")


@pytest.fixture
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(path: Path, **settings: Any) -> LanguageModel:
    return kvchat.load(str(path), **{"device": "cpu", "dtype": "float32", **settings})


def reply(llm: LanguageModel) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=3)
    ids = llm.tokenizer.encode("hi")
    return list(llm.engine.generate(ids, lambda: params, llm.tokenizer.stream_decoder()))


def test_what_a_model_knows_of_itself(folder: Path) -> None:
    llm = load(folder, ctx=100)
    assert (llm.name, llm.path) == (str(folder), folder)
    assert (llm.dtype, llm.quant, llm.device) == ("float32", "none", "cpu")
    assert llm.engine.max_seq_len == 100
    assert llm.config.max_seq_len == 256
    assert llm.tokenizer.eos_token_id in llm.engine.eog_ids
    assert llm.tokenizer.exempt_ids
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    mappings = [{"role": m.role, "content": m.content} for m in messages]
    assert llm.render(messages) == llm.render(mappings)
    assert llm.render(messages, add_generation_prompt=False).endswith("c<|im_end|>\n")
    logits, loss, cache = llm(torch.tensor([[1, 2, 3]]))
    assert loss is None
    assert cache.length == 3
    torch.testing.assert_close(logits[0, -1], llm.score([1, 2, 3])[-1])


def test_a_path_object_will_do(folder: Path) -> None:
    assert kvchat.load(folder, device="cpu", dtype="float32").path == folder


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": "x", "to": 1}])
def test_mappings_that_are_no_messages(folder: Path, message: dict[str, str]) -> None:
    with pytest.raises(TemplateError, match="role and a content"):
        load(folder).render([message])


def test_nothing_to_score(folder: Path) -> None:
    with pytest.raises(GenerationError, match="no tokens"):
        load(folder).score([])


# Progress.


def reports(path: Path, **settings: Any) -> list[LoadProgress]:
    seen: list[Any] = []
    load(path, progress=seen.append, **settings)
    return seen


def assert_sound(seen: list[LoadProgress]) -> None:
    done = [report.done for report in seen]
    assert len(done) > 10
    assert done == sorted(done)
    assert done[0] < seen[0].total / 4
    assert {report.total for report in seen} == {done[-1]}
    assert done[-2] <= done[-1]
    assert all(report.what for report in seen)


@pytest.mark.parametrize("shard", ["1GB", "60KB"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "llama-biased"])
def test_progress_of_a_folder(name: str, shard: str, tmp_path: Path) -> None:
    assert_sound(reports(save_folder(reference(name), tmp_path / "model", shard=shard)))


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q8_0"])
def test_progress_of_a_gguf_file(kind: str, quant: str, tmp_path: Path) -> None:
    assert_sound(reports(save_gguf(reference("llama3"), tmp_path / "m.gguf", kind), quant=quant))


def test_progress_where_weights_are_left_unread(tmp_path: Path) -> None:
    folder = save_folder(reference("llama3"), tmp_path / "model")
    edit_json(folder / "config.json", tie_word_embeddings=True)
    assert_sound(reports(folder))


@pytest.mark.parametrize("container", ["folder", "gguf_file"])
@pytest.mark.parametrize("after", [1, 5])
def test_an_exception_from_progress_ends_the_load(
    container: str, after: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(container)

    class Enough(Exception):
        pass

    seen = []

    def progress(report: object) -> None:
        seen.append(report)
        if len(seen) == after:
            raise Enough

    with pytest.raises(Enough):
        load(path, progress=progress)
    assert len(seen) == after
    reply(load(path))


# Settings.


@pytest.mark.parametrize("ctx", [0, -1, 257])
def test_a_context_the_model_does_not_have(ctx: int, folder: Path) -> None:
    with pytest.raises(SettingError, match=f"--ctx {ctx} is outside 1 to 256"):
        load(folder, ctx=ctx)


def test_a_context_of_ones_own_is_kept(folder: Path) -> None:
    llm = load(folder, ctx=10)
    params = SamplingParams(max_tokens=2)
    with pytest.raises(ContextOverflowError, match="the context holds 10"):
        list(llm.engine.generate([1] * 11, lambda: params, llm.tokenizer.stream_decoder()))


@pytest.mark.parametrize("threads", [0, -2, 10_000_000])
def test_impossible_thread_counts(threads: int, folder: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(SettingError, match=f"--threads {threads} is outside 1 to"):
        load(folder, threads=threads)
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("threads_kept")
def test_threads(folder: Path) -> None:
    load(folder, threads=1)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    "name", ["gpu", "", "cuda:x", "cpu:cpu", "meta", "xla", "cuda:99", "vulkan"]
)
def test_devices_that_are_not_there(name: str, folder: Path) -> None:
    with pytest.raises(SettingError, match=r"device|CUDA"):
        load(folder, device=name)


def test_devices() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type in ("cuda", "mps", "cpu")


def test_dtypes(folder: Path) -> None:
    assert pick_dtype("auto", torch.device("mps")) is torch.float16
    assert pick_dtype("auto", CPU) in (torch.bfloat16, torch.float32)
    with pytest.raises(SettingError, match=r"int8 is no dtype.*float32, float16, bfloat16"):
        load(folder, dtype="int8")


def test_quantisations(folder: Path) -> None:
    assert pick_quant("auto", "auto", CPU) == "auto"
    assert pick_quant("auto", "float32", CPU) == "none"
    assert pick_quant("int8", "float32", CPU) == "int8"
    assert pick_quant("auto", "auto", torch.device("mps")) == "none"
    assert pick_quant("auto", "bfloat16", torch.device("cuda")) == "none"
    for quant, device in (("int4", "mps"), ("int8", "mps"), ("int8", "cuda")):
        with pytest.raises(UnsupportedModelError, match=f"{quant} weights run on the CPU only"):
            pick_quant(quant, "auto", torch.device(device))


@pytest.mark.parametrize("has_products", [False, True])
def test_int4_on_a_gpu_hangs_on_the_operator(
    has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvchat.models.load.multiplies_tiles", lambda _: has_products)
    gpu = torch.device("cuda")
    assert pick_quant("auto", "auto", gpu) == ("auto" if has_products else "none")
    if has_products:
        assert pick_quant("int4", "auto", gpu) == "int4"
        return
    with pytest.raises(UnsupportedModelError, match="no int4 products"):
        pick_quant("int4", "auto", gpu)


def test_unknown_quantisations(folder: Path) -> None:
    with pytest.raises(SettingError, match="int2 is no quantisation"):
        load(folder, quant="int2")


@pytest.mark.parametrize(
    ("quant", "body", "head"),
    [
        ("none", Linear, Linear),
        ("int8", Int8Linear, Linear),  # 261 rows are none of the operator's shapes
        ("int4", Int4Linear, Linear),
    ],
)
@pytest.mark.parametrize("container", ["folder", "gguf_file"])
def test_classes_of_weights(
    quant: str, body: type, head: type, container: str, request: pytest.FixtureRequest
) -> None:
    llm = load(request.getfixturevalue(container), quant=quant, dtype="auto")
    assert type(llm.model.blocks[1].mlp.w_down) is body
    assert type(llm.model.blocks[0].attention.wqkv) is body
    assert type(llm.model.head) is head
    assert reply(llm)


def test_auto_keeps_what_the_file_holds(folder: Path, gguf_file: Path) -> None:
    settings = {"dtype": "auto", "quant": "auto"}
    assert type(load(gguf_file, **settings).model.blocks[0].mlp.w_down) is Int4Linear
    assert type(load(folder, **settings).model.blocks[0].mlp.w_down) is Linear


def test_weights_in_tiles_for_a_gpu_are_the_same_weights(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(gguf_file, dtype="auto")
    monkeypatch.setattr("kvchat.models.weights.Int4Linear", TiledInt4Linear)
    tiled = load(gguf_file, dtype="auto", packed_bytes=0)
    assert type(tiled.model.blocks[0].mlp.w_down) is TiledInt4Linear
    ids = list(range(60))
    a, b = (llm.score(ids).log_softmax(-1) for llm in (plain, tiled))
    assert (a.exp() * (a - b)).sum(-1).mean() < 1e-3
    step, cache = StaticStep(tiled.model), tiled.model.new_cache()
    rows = torch.stack([step(i, cache) for i in ids]).log_softmax(-1)
    assert (b.exp() * (b - rows)).sum(-1).mean() < 1e-3


def test_classes_of_weights_on_a_gpu(gguf_file: Path) -> None:
    """Told without one: on the meta device there are shapes and nothing else."""
    for quant, body in (("auto", TiledInt4Linear), ("int4", TiledInt4Linear), ("none", Linear)):
        model = build_transformer(
            GGUFWeights(GGUFFile(gguf_file)),
            dtype=torch.bfloat16,
            quant=quant,
            device=torch.device("meta"),
        )
        assert {type(block.mlp.w_down) for block in model.blocks} == {body}
        assert type(model.head) is Linear


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_shapes_that_no_operator_takes_stay_dense(quant: str, tmp_path: Path) -> None:
    model = reference("llama-odd-heads", intermediate_size=90)  # inner sizes 36 and 90
    llm = load(save_folder(model, tmp_path / "model"), quant=quant)
    assert {type(m) for m in llm.model.modules()} & {Int4Linear, Int8Linear} == set()
    assert torch.isfinite(llm.score([1, 2, 3])).all()


# The author's sampling settings.


def test_the_authors_settings_of_a_folder(folder: Path) -> None:
    edit_json(
        folder / "generation_config.json",
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        repetition_penalty=None,
        max_new_tokens=5,
        seed=3,
        do_sample=True,
    )
    assert load(folder).defaults == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)


def test_the_authors_settings_of_a_gguf_file(tmp_path: Path) -> None:
    model = reference("llama3")
    sampling = {
        "temp": 0.5,
        "top_k": 30,
        "min_p": 0.125,
        "penalty_repeat": 1.25,
        "penalty_last_n": 64,
        "mirostat": 0,
    }
    metadata = gguf_metadata(model) | {f"general.sampling.{k}": v for k, v in sampling.items()}
    path = write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(model))
    assert load(path).defaults == SamplingParams(
        temperature=0.5, top_k=30, min_p=0.125, repetition_penalty=1.25, penalty_window=64
    )


def test_silly_settings_of_the_author_are_ours() -> None:
    silly = {
        "temperature": -1,
        "top_k": "many",
        "top_p": float("nan"),
        "min_p": [0.1],
        "repetition_penalty": True,
        "presence_penalty": 10**400,
        "frequency_penalty": {"a": 1},
    }
    assert author_settings(silly) == SamplingParams()
    assert author_settings({**silly, "top_p": 0.5}) == SamplingParams(top_p=0.5)


def test_settings_that_are_whole_as_floats_still_draw(folder: Path) -> None:
    edit_json(folder / "generation_config.json", top_k=40.0, penalty_window=32.0)
    llm = load(folder)
    ids = llm.tokenizer.encode("hi")
    params = llm.defaults.updated(max_tokens=4, seed=1)
    assert list(llm.engine.generate(ids, lambda: params, llm.tokenizer.stream_decoder()))


# What cannot be loaded.


@pytest.mark.parametrize(
    "name", ["no-such-model", "/no/such/model.gguf", "./nothing", "who/what", ""]
)
def test_no_such_model(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        kvchat.load(name, device="cpu")
    assert name in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16, b"<html>"])
def test_files_that_are_no_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"m\.gguf"):
        load(path)


@pytest.mark.parametrize("share", [0.2, 0.6, 0.99])
def test_a_truncated_gguf_file(gguf_file: Path, share: float) -> None:
    content = gguf_file.read_bytes()
    gguf_file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelFileError, match=r"model\.gguf.*again"):
        load(gguf_file)


@pytest.mark.parametrize("content", [b"", b"not json", b"[1, 2]", b"null", b"\xff\xfe\x00"])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_broken_json(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(KvchatError, match=name.replace(".", r"\.")):
        load(folder)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load(folder)


def test_a_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load(folder)


def test_a_gguf_file_without_tokenizer(tmp_path: Path) -> None:
    model = reference("llama3")
    metadata = {k: v for k, v in gguf_metadata(model).items() if not k.startswith("tokenizer")}
    with pytest.raises(TokenizerError):
        load(write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(model)))


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth"])
def test_pickled_weights(folder: Path, suffix: str) -> None:
    pickled = folder / f"pytorch_model.{suffix}"
    (folder / "model.safetensors").rename(pickled)
    for path in (folder, pickled):
        with pytest.raises(UnsupportedModelError, match=r"pickle.*(safetensors|GGUF)"):
            load(path)


def test_an_architecture_that_is_not_supported(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(UnsupportedModelError, match=r"T5ForConditionalGeneration.*supported are"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_that_are_no_numbers(folder: Path, name: str, value: float) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name] = torch.full_like(weights[name], value)
    path.unlink()
    save_file(weights, path)
    with pytest.raises(GenerationError, match="not a number"):
        reply(load(folder))


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = save_folder(reference("llama3", vocab_size=200), tmp_path / "model")
    llm = load(folder)
    ids = llm.tokenizer.encode("<|im_end|>")
    assert ids[0] >= 200
    params = SamplingParams(max_tokens=1)
    with pytest.raises(KvchatError, match="vocabulary"):
        list(llm.engine.generate(ids, lambda: params, llm.tokenizer.stream_decoder()))
    with pytest.raises(KvchatError, match="vocabulary"):
        llm.score(ids)


def test_config_is_checked_before_weights_are_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    seen: list[object] = []
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        edit_json(folder / "config.json", **{**config, key: 10**12})
        with pytest.raises(ModelFileError, match=key):
            load(folder, progress=seen.append)
    assert not seen


def test_the_architecture_is_looked_at_before_the_tokenizer(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["BertModel"])
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match="BertModel"):
        load(folder)


@pytest.mark.parametrize("setting", ["ctx", "threads"])
@pytest.mark.parametrize("value", [1.5, "1", 0])
def test_settings_that_are_not_whole_numbers(setting: str, value: object, folder: Path) -> None:
    with pytest.raises(SettingError, match=f"--{setting}"):
        load(folder, **{setting: value})


def test_the_content_of_a_message_is_text(folder: Path) -> None:
    with pytest.raises(TemplateError, match="must be strings"):
        load(folder).render([{"role": "user", "content": None}])  # type: ignore[dict-item]


def test_ids_no_vocabulary_has_are_no_text(folder: Path) -> None:
    assert load(folder).tokenizer.decode([-1, 10**6, 2**40]) == ""
