"""TextGenerator with our models and with strangers that only keep the calling convention."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoints import reference, save_folder
from torch import Tensor, nn

import kvchat
from kvchat.engine import TextGenerator, sample_next_token
from kvchat.engine.errors import ContextOverflowError, GenerationError, SettingError
from kvchat.engine.types import SamplingParams, TokenGenerated
from kvchat.models.load import LanguageModel

EOS = 256
CHINESE = "你好，世界！👩‍👩‍👧 é"


class ByteTokenizer:
    """A stranger: every byte of UTF-8 is a token, and one more ends the text."""

    eos_token_id = EOS

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(i for i in ids if i < EOS).decode("utf-8", "replace")


class Reciter:
    """A stranger that is no torch module: it says one text by heart and records its calls."""

    def __init__(self, text: bytes, prompt_length: int, max_seq_len: int = 1000) -> None:
        self.config = SimpleNamespace(max_seq_len=max_seq_len)
        self.script = [*text, EOS]
        self.prompt_length = prompt_length
        self.calls: list[tuple[list[int], int]] = []

    def __call__(
        self, input_ids: Tensor, past_key_values: Any = None, start_pos: int = 0
    ) -> tuple[Tensor, None, int]:
        assert (past_key_values or 0) == start_pos
        self.calls.append((input_ids[0].tolist(), start_pos))
        end = start_pos + input_ids.shape[1]
        logits = torch.zeros(1, input_ids.shape[1], EOS + 1)
        logits[0, -1, self.script[end - self.prompt_length]] = 50.0
        return logits, None, end


class RecitingModule(nn.Module):
    """The same as a torch module, with a weight whose device and mode can be looked at."""

    def __init__(self, reciter: Reciter) -> None:
        super().__init__()
        self.reciter = reciter
        self.config = reciter.config
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, start_pos: int = 0
    ) -> tuple[Tensor, None, int]:
        assert not self.training
        return self.reciter(input_ids, past_key_values, start_pos)


class Terminal(io.StringIO):
    """Stands in for stdout and remembers what was on screen at every flush."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def flush(self) -> None:
        self.shown.append(self.getvalue())


def recite(
    text: bytes, prompt: str = "> ", *, max_seq_len: int = 1000, **settings: Any
) -> tuple[str, Reciter]:
    model = Reciter(text, len(prompt.encode()), max_seq_len)
    new = TextGenerator(model, ByteTokenizer()).generate(prompt, **settings)
    return new, model


def test_one_prefill_then_one_token_at_a_time() -> None:
    new, model = recite(b"abc", "hey", stream=False)
    assert new == "abc"
    assert model.calls == [([*b"hey"], 0), ([*b"a"], 3), ([*b"b"], 4), ([*b"c"], 5)]


def test_characters_over_several_tokens_appear_whole() -> None:
    prompt = "问："
    with redirect_stdout(Terminal()) as terminal:
        new, _ = recite(CHINESE.encode(), prompt)
    assert new == CHINESE
    assert terminal.getvalue() == prompt + CHINESE + "\n"
    assert terminal.shown[0] == prompt
    assert not any("\ufffd" in screen for screen in terminal.shown)
    lengths = {len(screen) for screen in terminal.shown}
    assert lengths >= set(range(len(prompt), len(prompt + CHINESE) + 1))  # each when it is whole


def test_broken_bytes_are_shown_in_the_end() -> None:
    with redirect_stdout(Terminal()) as terminal:
        new, _ = recite(b"ok\xe4\xbd")
    assert new == "ok\ufffd"
    assert terminal.getvalue() == "> ok\ufffd\n"


def test_broken_bytes_inside() -> None:
    with redirect_stdout(Terminal()) as terminal:
        new, _ = recite(b"a\xffb\xe4\xbdc\xf0\x9f\x91\x8d")
    assert new == "a\ufffdb\ufffdc👍"
    assert terminal.getvalue() == f"> {new}\n"


def test_a_terminal_gets_no_control_codes() -> None:
    terminal = Terminal()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with redirect_stdout(terminal):
        reciter = Reciter("\x1b[2Ja\tb\x9b👩‍👩‍👧".encode(), prompt_length=5)
        text = TextGenerator(reciter, ByteTokenizer()).generate("x\x07\nyz", temperature=0)
    assert text == "\x1b[2Ja\tb\x9b👩‍👩‍👧"
    assert terminal.getvalue() == "x\nyz[2Ja\tb👩‍👩‍👧\n"


def test_a_torch_module_is_put_into_evaluation_mode() -> None:
    module = RecitingModule(Reciter(b"hello", 1)).train()
    with redirect_stdout(Terminal()) as terminal:
        assert TextGenerator(module, ByteTokenizer(), device="cpu").generate("x") == "hello"
    assert not module.training
    assert terminal.getvalue() == "xhello\n"


def test_nothing_is_printed_without_stream(capsys: pytest.CaptureFixture[str]) -> None:
    recite(b"abc", stream=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("limit", "text", "fed"), [(0, "", 1), (1, "a", 1), (2, "ab", 2), (3, "abc", 3), (9, "abc", 4)]
)
def test_max_new_tokens(limit: int, text: str, fed: int) -> None:
    with redirect_stdout(Terminal()) as terminal:
        new, model = recite(b"abc", max_new_tokens=limit)
    assert new == text
    assert len(model.calls) == fed
    assert terminal.getvalue() == f"> {text}\n"


def test_stops_at_the_end_of_the_context() -> None:
    new, model = recite(b"a" * 50, "1234", max_seq_len=10, stream=False)
    last, start_pos = model.calls[-1]
    assert start_pos + len(last) == 10  # the context is used up and not overrun
    assert new == "a" * 7


def test_a_prompt_that_fills_the_context() -> None:
    new, model = recite(b"a" * 50, "1234", max_seq_len=4, stream=False)
    assert (new, len(model.calls)) == ("a", 1)
    with pytest.raises(ContextOverflowError, match="5 tokens and the context holds 4"):
        recite(b"a", "12345", max_seq_len=4)


def test_an_empty_prompt_is_refused_before_the_model_runs() -> None:
    model = Reciter(b"abc", 0)
    with redirect_stdout(Terminal()) as terminal, pytest.raises(GenerationError, match="empty"):
        TextGenerator(model, ByteTokenizer()).generate("")
    assert not model.calls
    assert not terminal.getvalue()


@pytest.mark.parametrize("setting", [{"temperature": -1}, {"top_p": 0}, {"repetition_penalty": 0}])
def test_settings_out_of_range(setting: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=next(iter(setting))):
        recite(b"abc", stream=False, **setting)


def test_nan_is_an_error() -> None:
    def model(*args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
        return torch.full((1, 1, 257), torch.nan), None, None

    model.config = SimpleNamespace(max_seq_len=10)  # type: ignore[attr-defined]
    with pytest.raises(GenerationError, match="not a number"):
        TextGenerator(model, ByteTokenizer()).generate("x", stream=False)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("llm")
    save_folder(reference("llama3", seed=5), folder)
    return kvchat.load(str(folder), device="cpu", dtype="float32", quant="none")


def test_greedy_is_the_engines_greedy(llm: LanguageModel) -> None:
    prompt = "the quick 你好 fox"
    ids = llm.tokenizer.encode(prompt, add_bos=True)
    params = SamplingParams(temperature=0, penalty_window=-1, max_tokens=25)
    stream = llm.tokenizer.stream_decoder()
    events = list(llm.engine.generate(ids, lambda: params, stream))
    replies = [e.id for e in events if isinstance(e, TokenGenerated)]
    assert len(replies) > 10

    text = TextGenerator(llm, llm.tokenizer).generate(
        prompt, max_new_tokens=25, temperature=0, stream=False
    )
    assert text == llm.tokenizer.decode(replies)

    naive = list(ids)
    for _ in range(len(replies)):
        logits = llm.score(naive)[-1]
        naive.append(
            sample_next_token(
                logits, temperature=0, generated_ids=naive, exempt_ids=llm.tokenizer.exempt_ids
            )
        )
    assert naive[len(ids) :] == replies


@pytest.mark.parametrize("inner", [False, True])
def test_our_models_stream_what_they_return(llm: LanguageModel, inner: bool) -> None:
    model = llm.model if inner else llm
    torch.manual_seed(3)
    generator = TextGenerator(model, llm.tokenizer)
    with redirect_stdout(Terminal()) as terminal:
        new = generator.generate("the ", max_new_tokens=30, temperature=1.5)
    assert new
    assert terminal.getvalue() == f"the {new}\n"
