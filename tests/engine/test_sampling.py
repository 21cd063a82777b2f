"""The sampler against hand-made vectors, a plain sort-based reference, and its own promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvchat.engine.errors import GenerationError, SettingError
from kvchat.engine.penalties import penalise, penalty_counts
from kvchat.engine.sampling import Draw, Sampler, sample_next_token
from kvchat.engine.types import SamplingParams
from kvchat.engine.warpers import distribution, leading

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
FIVE = [0.4, 0.3, 0.15, 0.1, 0.05]


def neutral(**changes: Any) -> SamplingParams:
    return SamplingParams(**{**NEUTRAL, **changes})


def log(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(logits: torch.Tensor, params: SamplingParams, context: list[int] | None = None) -> Draw:
    return Sampler().sample(logits, context or [], params, seeded())


def kept(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Id -> probability of what is drawn from."""
    ids, _, weights = distribution(logits.numpy(), params)
    total = weights.sum()
    return {int(ids[i]): float(weights[i] / total) for i in np.flatnonzero(weights)}


def reference(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """The same by sorting everything, in float64."""
    scores = logits.double().numpy()
    rank = [int(i) for i in np.argsort(-scores, kind="stable") if scores[i] > -math.inf]
    if 0 < params.top_k < len(scores):
        kth = scores[rank[min(params.top_k, len(rank)) - 1]]
        rank = [i for i in rank if scores[i] >= kth]
    temperature = 1.0 if params.temperature_last else params.temperature
    weights = np.exp((scores[rank] - scores[rank[0]]) / temperature)
    if params.top_p < 1:
        reached = np.cumsum(weights)
        count = int(np.argmax(reached >= params.top_p * weights.sum())) + 1
        rank, weights = rank[:count], weights[:count]
    rank = [i for i, weight in zip(rank, weights, strict=True) if weight >= params.min_p]
    weights = np.exp((scores[rank] - scores[rank[0]]) / params.temperature)
    return dict(zip(rank, (weights / weights.sum()).tolist(), strict=True))


class TestByHand:
    def test_top_p_keeps_the_token_that_crosses(self) -> None:
        found = kept(log([0.5, 0.35, 0.1, 0.05]), neutral(top_p=0.8))
        assert found == pytest.approx({0: 0.5 / 0.85, 1: 0.35 / 0.85})

    def test_top_p_stops_where_p_is_reached_exactly(self) -> None:
        assert set(kept(torch.zeros(8), neutral(top_p=0.5))) == {0, 1, 2, 3}

    def test_top_p_tiny_keeps_the_first(self) -> None:
        assert kept(log(FIVE), neutral(top_p=1e-9)) == {0: 1.0}

    def test_top_p_counts_what_top_k_kept(self) -> None:
        # of 0.4 + 0.3 the first has 57%, which reaches 0.5 alone; of all five it does not
        assert set(kept(log(FIVE), neutral(top_k=2, top_p=0.5))) == {0}
        assert set(kept(log(FIVE), neutral(top_p=0.5))) == {0, 1}

    def test_top_k_keeps_all_ties(self) -> None:
        logits = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 0.0])
        assert set(kept(logits, neutral(top_k=3))) == {0, 1, 2, 3, 4}

    @pytest.mark.parametrize("k", [5, 6, 10**9])
    def test_top_k_beyond_the_vocabulary_keeps_all(self, k: int) -> None:
        assert kept(log(FIVE), neutral(top_k=k)) == pytest.approx(dict(enumerate(FIVE)))

    def test_min_p_is_relative_to_the_first(self) -> None:
        assert set(kept(log(FIVE), neutral(min_p=0.3))) == {0, 1, 2}

    def test_min_p_one_keeps_what_ties_with_the_first(self) -> None:
        assert set(kept(torch.tensor([2.0, 5.0, 5.0, 4.99]), neutral(min_p=1.0))) == {1, 2}

    def test_temperature_divides(self) -> None:
        assert kept(log([0.8, 0.2]), neutral(temperature=0.5)) == pytest.approx(
            {0: 0.64 / 0.68, 1: 0.04 / 0.68}
        )

    def test_temperature_last_truncates_first(self) -> None:
        hot = neutral(temperature=10.0, top_p=0.6)
        assert set(kept(log(FIVE), hot)) == {0, 1, 2}
        late = kept(log(FIVE), hot.updated(temperature_last=True))
        assert set(late) == {0, 1}
        assert late[0] / late[1] == pytest.approx((4 / 3) ** 0.1)

    def test_temperature_last_revives_what_underflows_before_it(self) -> None:
        params = neutral(temperature=100.0, temperature_last=True)
        assert kept(torch.tensor([0.0, -800.0]), params)[1] == pytest.approx(
            math.exp(-8) / (1 + math.exp(-8))
        )


class TestAgainstSorting:
    @settings(max_examples=300, deadline=None)
    @given(
        size=st.one_of(st.integers(1, 60), st.sampled_from([700, 1025, 3000])),
        levels=st.sampled_from([1, 2, 5, 40, 10**6]),
        spread=st.sampled_from([0.01, 1.0, 8.0]),
        outliers=st.lists(st.sampled_from([-math.inf, -1e30, -50.0, 30.0, 1e4]), max_size=3),
        seed=st.integers(0, 2**32 - 1),
        top_k=st.sampled_from([0, 1, 3, 20, 50, 500, 5000]),
        top_p=st.one_of(st.sampled_from([1e-6, 0.5, 0.95, 0.999, 1.0]), st.floats(0.01, 0.99)),
        min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
        temperature=st.sampled_from([0.01, 0.7, 1.0, 1.5, 100.0]),
        temperature_last=st.booleans(),
    )
    def test_same_ids_and_probabilities(
        self,
        size: int,
        levels: int,
        spread: float,
        outliers: list[float],
        seed: int,
        top_k: int,
        top_p: float,
        min_p: float,
        temperature: float,
        temperature_last: bool,
    ) -> None:
        random = np.random.default_rng(seed)
        values = random.integers(0, levels, size) / levels * spread * 4
        for value in outliers:
            values[random.integers(size)] = value
        logits = torch.from_numpy(values.astype(np.float32))
        if not torch.isfinite(logits).any():
            logits[0] = 0
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=1.0,
            temperature_last=temperature_last,
        )
        expected = {i: p for i, p in reference(logits, params).items() if p > 0}
        assert kept(logits, params) == pytest.approx(expected, rel=1e-9, abs=0)

        found = draw(logits, params)
        first = list(expected.items())[:20]
        assert found.id in expected
        assert list(found.after.ids) == [i for i, _ in first]
        assert np.exp(found.after.logprobs) == pytest.approx([p for _, p in first], rel=1e-4)

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_large_flat_nucleus(self, p: float, dtype: torch.dtype) -> None:
        logits = torch.randn(20_000, generator=seeded()).mul(0.1).to(dtype).float()
        assert set(kept(logits, neutral(top_p=p))) == set(reference(logits, neutral(top_p=p)))

    def test_outliers_do_not_hide_the_rest(self) -> None:
        # nearly everything falls into one bin of the first histogram
        logits = torch.randn(5_000, generator=seeded()).mul(1e-3)
        logits[17], logits[4_000] = 12.0, 11.0
        params = neutral(top_p=0.99)
        assert set(kept(logits, params)) == set(reference(logits, params))

    @settings(max_examples=100, deadline=None)
    @given(
        size=st.integers(1, 3000),
        levels=st.integers(1, 30),
        k=st.integers(1, 60),
        seed=st.integers(0, 999),
    )
    def test_leading_is_a_stable_sort(self, size: int, levels: int, k: int, seed: int) -> None:
        scores = np.random.default_rng(seed).integers(-levels, levels, size).astype(np.float32)
        expected = np.argsort(-scores, kind="stable")[:k]
        assert leading(scores, k).tolist() == expected.tolist()


class TestPenalties:
    LOGITS = np.array([2.0, -2.0, 0.0, 4.0], dtype=np.float32)

    def apply(self, context: list[int], exempt_ids: tuple[int, ...] = (), **changes: Any) -> Any:
        params = neutral(**changes)
        counts = penalty_counts(context, params, exempt_ids, len(self.LOGITS))
        return penalise(self.LOGITS, counts, params).tolist()

    def test_repetition_weakens_either_sign(self) -> None:
        assert self.apply([0, 1, 2], repetition_penalty=2.0) == [1.0, -4.0, 0.0, 4.0]

    def test_repetition_below_one_strengthens(self) -> None:
        assert self.apply([0, 1], repetition_penalty=0.5) == [4.0, -1.0, 0.0, 4.0]

    def test_each_id_counts_once(self) -> None:
        assert self.apply([0, 0, 0], repetition_penalty=2.0) == [1.0, -2.0, 0.0, 4.0]
        assert self.apply([0, 0, 0], presence_penalty=0.5) == [1.5, -2.0, 0.0, 4.0]

    def test_frequency_counts_every_time(self) -> None:
        assert self.apply([3, 0, 3, 3], frequency_penalty=0.5) == [1.5, -2.0, 0.0, 2.5]

    def test_all_three_in_order(self) -> None:
        found = self.apply(
            [3, 3], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
        )
        assert found == [2.0, -2.0, 0.0, 4.0 / 2 - 0.5 - 2 * 0.25]

    @pytest.mark.parametrize(
        ("window", "expected"),
        [(0, [2.0, 4.0]), (1, [2.0, 2.0]), (2, [1.0, 2.0]), (-1, [1.0, 2.0]), (99, [1.0, 2.0])],
    )
    def test_window(self, window: int, expected: list[float]) -> None:
        found = self.apply([0, 3], repetition_penalty=2.0, penalty_window=window)
        assert [found[0], found[3]] == expected

    def test_exempt_ids_are_spared_unless_all_are_penalised(self) -> None:
        assert self.apply([0, 3], (3,), repetition_penalty=2.0) == [1.0, -2.0, 0.0, 4.0]
        logits = torch.from_numpy(self.LOGITS)
        params = neutral(repetition_penalty=4.0, temperature=0)
        sampler = Sampler(exempt_ids=[3])
        assert sampler.sample(logits, [3], params, seeded()).id == 3
        assert sampler.sample(logits, [3], params.updated(penalise_all=True), seeded()).id == 0

    @pytest.mark.parametrize("token_id", [4, -1])
    def test_id_outside_the_vocabulary(self, token_id: int) -> None:
        with pytest.raises(SettingError, match="vocabulary of 4 ids"):
            self.apply([token_id], repetition_penalty=2.0)

    def test_penalties_beyond_float32_are_refused(self) -> None:
        with pytest.raises(GenerationError):
            draw(torch.tensor([3e38]), neutral(repetition_penalty=0.1), [0])


class TestDraw:
    def test_frequencies(self) -> None:
        sampler, generator, params = Sampler(), seeded(7), neutral()
        shares = [0.3, 0.05, 0.2, 0.01, 0.14, 0.15, 0.05, 0.1]
        counts = [0] * len(shares)
        for _ in range(5_000):
            counts[sampler.sample(log(shares), [], params, generator).id] += 1
        expected = np.array(shares) * 5_000
        chi_square = float(((np.array(counts) - expected) ** 2 / expected).sum())
        assert chi_square < 29.9  # 7 degrees of freedom: exceeded once in ten thousand seeds

    def test_frequencies_of_a_large_nucleus(self) -> None:
        logits = torch.randn(4_000, generator=seeded()).mul(0.3)
        params = neutral(top_p=0.9)
        shares = np.zeros(8)
        for token_id, probability in reference(logits, params).items():
            shares[token_id // 500] += probability
        counts, generator = np.zeros(8), seeded(3)
        for _ in range(2_000):
            counts[Sampler().sample(logits, [], params, generator).id // 500] += 1
        assert float(((counts - shares * 2_000) ** 2 / (shares * 2_000)).sum()) < 29.9

    def test_seed_repeats_the_sequence(self) -> None:
        def sequence(seed: int) -> list[int]:
            generator = seeded(seed)
            logits = torch.randn(500, generator=seeded(1))
            return [Sampler().sample(logits, [], neutral(), generator).id for _ in range(30)]

        assert sequence(5) == sequence(5) != sequence(6)

    def test_same_distribution_same_draw_whatever_kept_it(self) -> None:
        logits = torch.randn(3_000, generator=seeded(2)).mul(4).round()
        by_top_k = neutral(top_k=30)
        ids = kept(logits, by_top_k)
        floor = min(ids.values()) / max(ids.values()) * 0.99
        by_min_p = neutral(min_p=floor)
        assert set(kept(logits, by_min_p)) == set(ids)
        for seed in range(50):
            one = Sampler().sample(logits, [], by_top_k, seeded(seed))
            other = Sampler().sample(logits, [], by_min_p, seeded(seed))
            assert one == other

    def test_one_number_a_draw_and_none_when_greedy(self) -> None:
        generator, twin = seeded(), seeded()
        Sampler().sample(log(FIVE), [], neutral(temperature=1e-4), generator)
        assert torch.equal(generator.get_state(), twin.get_state())
        Sampler().sample(log(FIVE), [], neutral(top_k=1), generator)
        torch.rand((), dtype=torch.float64, generator=twin)
        assert torch.equal(generator.get_state(), twin.get_state())

    def test_the_largest_number_draws_no_token_of_weight_zero(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1.0).double())
        assert draw(torch.tensor([0.0, 1.0, -math.inf, -1e9]), neutral()).id == 1

    def test_zero_draws_no_token_of_weight_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(0.0).double())
        assert draw(torch.tensor([-math.inf, -1e9, 0.0, 1.0]), neutral()).id == 2


class TestSampler:
    def test_greedy_takes_the_lowest_id_of_equals(self) -> None:
        found = draw(torch.tensor([1.0, 7.0, 7.0, 3.0]), neutral(temperature=0))
        assert found.id == 1
        assert (list(found.after.ids), list(found.after.logprobs)) == ([1], [0.0])

    def test_greedy_after_penalties(self) -> None:
        params = neutral(temperature=0, repetition_penalty=2.0)
        assert draw(torch.tensor([3.0, 4.0]), params, [1]).id == 0

    def test_before_is_the_model_own_distribution(self) -> None:
        logits = torch.randn(1_000, generator=seeded()) * 3
        params = SamplingParams(presence_penalty=2.0)
        found = Sampler().sample(logits, list(range(500)), params, seeded())
        expected = logits.log_softmax(0)
        top = expected.topk(20)
        assert list(found.before.ids) == top.indices.tolist()
        assert list(found.before.logprobs) == pytest.approx(top.values.tolist(), rel=1e-5)
        assert found.logprob == pytest.approx(expected[found.id].item(), rel=1e-5)

    def test_logprob_is_exact_far_from_zero(self) -> None:
        found = draw(torch.tensor([1e5, 1e5, -1e5]), neutral())
        assert found.logprob == pytest.approx(math.log(0.5))

    def test_after_sums_to_one(self) -> None:
        logits = torch.randn(5_000, generator=seeded())
        found = draw(logits, SamplingParams(top_k=20, top_p=0.99))
        assert len(found.after.ids) <= 20
        assert math.fsum(math.exp(x) for x in found.after.logprobs) == pytest.approx(1, abs=1e-6)

    def test_candidates_are_compact(self) -> None:
        found = draw(torch.randn(100, generator=seeded()), neutral())
        for part in (found.before, found.after):
            assert (part.ids.typecode, part.logprobs.typecode) == ("i", "f")
            assert len(part.ids) == len(part.logprobs) == 20

    def test_impossible_tokens_are_no_candidates(self) -> None:
        found = draw(torch.tensor([-math.inf, 0.0, -math.inf, 1.0]), neutral(top_k=3))
        assert list(found.before.ids) == list(found.after.ids) == [3, 1]

    def test_changed_params_act_on_the_next_call(self) -> None:
        sampler, generator, logits = Sampler(), seeded(), torch.zeros(50)
        wide = sampler.sample(logits, [], neutral(), generator)
        narrow = sampler.sample(logits, [], neutral(top_p=0.1), generator)
        assert (len(wide.after.ids), len(narrow.after.ids)) == (20, 5)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        logits = torch.randn(2_000, generator=seeded()).to(dtype)
        params = SamplingParams(top_k=40)
        one = Sampler().sample(logits, [5, 6], params, seeded(9))
        assert one == Sampler().sample(logits.float(), [5, 6], params, seeded(9))

    def test_one_row_is_a_vector(self) -> None:
        logits = torch.randn(300, generator=seeded())
        assert draw(logits[None], neutral()) == draw(logits, neutral())

    def test_strided_logits(self) -> None:
        logits = torch.randn(300, 2, generator=seeded())[:, 1]
        assert draw(logits, neutral()) == draw(logits.contiguous(), neutral())

    @pytest.mark.parametrize("params", [neutral(), neutral(temperature=0), SamplingParams()])
    def test_a_vocabulary_of_one(self, params: SamplingParams) -> None:
        found = draw(torch.tensor([-3.0]), params)
        assert (found.id, found.logprob, list(found.after.logprobs)) == (0, 0.0, [0.0])

    @pytest.mark.parametrize("greedy", [True, False])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("size", [1, 4, 5_000])
    def test_nan_and_infinity_are_refused(self, greedy: bool, bad: float, size: int) -> None:
        logits = torch.zeros(size)
        logits[-1] = bad
        with pytest.raises(GenerationError, match="not a number or infinite"):
            draw(logits, SamplingParams(temperature=0.0 if greedy else 1.0), [0])

    def test_nothing_possible_is_refused(self) -> None:
        with pytest.raises(GenerationError):
            draw(torch.full((9,), -math.inf), neutral())

    @pytest.mark.parametrize("shape", [(2, 5), (5, 1), (1, 1, 5), (), (0,), (1, 0)])
    def test_other_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(SettingError, match=r"[Ll]ogits"):
            draw(torch.zeros(shape), neutral())

    def test_only_tensors_are_logits(self) -> None:
        with pytest.raises(SettingError, match="ndarray"):
            sample_next_token(np.zeros(5, dtype=np.float32))  # type: ignore[arg-type]

    @pytest.mark.filterwarnings("error")
    def test_penalties_that_leave_nothing_are_named(self) -> None:
        with pytest.raises(GenerationError, match="penalties"):
            draw(torch.tensor([2.0, 1.0, 0.0]), neutral(repetition_penalty=1e-300), [0, 1, 2])

    def test_an_id_beyond_any_vocabulary_is_refused(self) -> None:
        with pytest.raises(SettingError, match="vocabulary of 5"):
            sample_next_token(log(FIVE), generated_ids=[10**30])

    def test_whole_numbers_are_no_logits(self) -> None:
        with pytest.raises(SettingError, match="int64"):
            draw(torch.tensor([1, 2]), neutral())


class TestSampleNextToken:
    def test_logits_are_not_modified_and_need_no_grad(self) -> None:
        logits = torch.randn(1, 200, generator=seeded(), requires_grad=True)
        copy = logits.detach().clone()
        sample_next_token(logits, generated_ids=[1, 2, 3], generator=seeded())
        sample_next_token(logits, temperature=0, generated_ids=[1, 2, 3])
        assert torch.equal(logits, copy)

    def test_it_draws_what_the_sampler_draws(self) -> None:
        logits, context = torch.randn(500, generator=seeded()), list(range(0, 500, 3)) * 2
        params = SamplingParams(penalty_window=-1)
        for seed in range(20):
            expected = Sampler([3]).sample(logits, context, params, seeded(seed)).id
            found = sample_next_token(
                logits, 0.8, 50, 0.9, 1.1, context, exempt_ids={3}, generator=seeded(seed)
            )
            assert found == expected

    def test_every_generated_id_is_penalised_once(self) -> None:
        logits = torch.tensor([8.0, 3.0, 1.0])
        long_ago = [0] + [2] * 1_000
        assert sample_next_token(logits, 0, repetition_penalty=2.5, generated_ids=[0, 0, 0]) == 0
        assert sample_next_token(logits, 0, repetition_penalty=3.0, generated_ids=long_ago) == 1
        spared = sample_next_token(
            logits, 0, repetition_penalty=3.0, generated_ids=long_ago, exempt_ids=[0]
        )
        assert spared == 0

    def test_the_global_generator_serves_by_default(self) -> None:
        logits = torch.zeros(10_000)
        torch.manual_seed(1)
        first = [sample_next_token(logits, top_k=0) for _ in range(3)]
        torch.manual_seed(1)
        assert [sample_next_token(logits, top_k=0) for _ in range(3)] == first
        assert len(set(first)) > 1

    def test_ids_may_come_as_a_tensor(self) -> None:
        logits = torch.tensor([2.0, 1.0])
        assert sample_next_token(logits, 0, 0, 1.0, 4.0, torch.tensor([0])) == 1

    @pytest.mark.parametrize(
        "bad",
        [
            {"temperature": -0.1},
            {"temperature": math.nan},
            {"top_k": -1},
            {"top_k": 2.5},
            {"top_p": 0.0},
            {"top_p": 1.1},
            {"min_p": -0.1},
            {"min_p": 1.5},
            {"repetition_penalty": 0.0},
            {"generated_ids": [0.5]},
            {"generated_ids": [5]},
            {"generated_ids": ["1"]},
        ],
    )
    def test_bad_values(self, bad: dict[str, Any]) -> None:
        with pytest.raises(SettingError):
            sample_next_token(torch.zeros(5), **bad)


class TestParams:
    def test_numbers_of_numpy_are_numbers(self) -> None:
        params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(2))  # type: ignore[arg-type]
        assert draw(log(FIVE), params).id in (0, 1)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("temperature", "from 0 to 100, not None"),
            ("top_k", "from 0 to 2,147,483,647, not None"),
            ("top_p", "above 0 to 1, not None"),
        ],
    )
    def test_only_what_may_be_absent_may_be_none(self, name: str, said: str) -> None:
        with pytest.raises(SettingError, match=said):
            SamplingParams(**{name: None})
        assert SamplingParams(seed=None, max_tokens=None) == SamplingParams()

    def test_a_list_of_stop_strings_is_kept_as_a_tuple(self) -> None:
        assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]

    @pytest.mark.parametrize("stop", ["END", None, 5, ("",), (b"a",), ["a", ""]])
    def test_other_stop_strings_are_refused(self, stop: Any) -> None:
        with pytest.raises(SettingError, match="stop must be a list of strings"):
            SamplingParams(stop=stop)
