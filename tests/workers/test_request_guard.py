"""The guard around vLLM's own OutputProcessor: a request that fails ends alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from workers.engine.request_guard import guard

pytestmark = pytest.mark.slow  # vLLM is imported

ROWS = 64
PAD = ROWS  # the tokenizer's own, without a row


@pytest.fixture
def processor() -> Any:
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.v1.engine.output_processor import OutputProcessor

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(ROWS)}, unk_token="w2"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w2", pad_token="[PAD]")
    made = OutputProcessor(get_cached_tokenizer(tokenizer), log_stats=False)
    model = SimpleNamespace(get_vocab_size=lambda: ROWS)
    guard(SimpleNamespace(output_processor=made, model_config=model))
    return made


def add(processor: Any, name: str, prompt: list[int], **params: Any) -> Any:
    """A request as AsyncLLM adds it; what its client waits at."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

    sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=4, **params)
    if params.get("bad_words"):
        sampling.update_from_tokenizer(processor.tokenizer)
    required = len(EngineCoreRequest.__struct_fields__) - len(EngineCoreRequest.__struct_defaults__)
    fields: dict[str, Any] = dict.fromkeys(EngineCoreRequest.__struct_fields__[:required])
    fields |= {"request_id": name, "prompt_token_ids": prompt, "sampling_params": sampling}
    fields |= {"arrival_time": 0.0, "external_req_id": name}
    queue = RequestOutputCollector(sampling.output_kind, name)
    processor.add_request(EngineCoreRequest(**fields), None, None, 0, queue)
    return queue


def output(name: str, token: int, **more: Any) -> Any:
    from vllm.v1.engine import EngineCoreOutput

    return EngineCoreOutput(request_id=name, new_token_ids=[token], **more)


@pytest.mark.parametrize(
    ("named", "prompt", "params"),
    [
        (r"prompt: token 64 \('\[PAD\]'\) is outside the model's vocabulary of 64", [5, PAD], {}),
        ("prompt: token -1 ", [5, -1], {}),
        ("stop_token_ids: token 70 ", [5], {"stop_token_ids": [3, 70]}),
        ("logit_bias: token 64 ", [5], {"logit_bias": {PAD: 1.0}}),
        ("allowed_token_ids: token -3 ", [5], {"allowed_token_ids": [-3, 4]}),
        (r"bad_words: token 64 \('\[PAD\]'\)", [5], {"bad_words": ["[PAD]"]}),
    ],
)
def test_an_id_without_a_row_is_refused_by_name(
    processor: Any, named: str, prompt: list[int], params: Any
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=named):
        add(processor, "a", prompt, **params)
    assert not processor.has_unfinished_requests()


def test_the_models_own_ends_without_a_row_are_left_out(processor: Any) -> None:
    """An end that it never makes; `min_tokens` would index the logits with it."""
    from vllm import SamplingParams

    sampling = SamplingParams(min_tokens=2)
    sampling.update_from_generation_config({"eos_token_id": [3, PAD]}, 5)
    request = SimpleNamespace(prompt_token_ids=[5], sampling_params=sampling)
    from workers.engine.request_guard import check_ids

    sampling.stop_token_ids = []
    check_ids(request, ROWS, processor.tokenizer)
    assert sampling.all_stop_token_ids == {3, 5}


async def test_the_failing_request_gets_the_error_and_others_their_tokens(processor: Any) -> None:
    stopped = add(processor, "stopped", [5], stop=["w7"])
    broken, other = add(processor, "broken", [5], logprobs=1), add(processor, "other", [5])
    done = processor.process_outputs(
        [output("stopped", 7), output("broken", 8, new_logprobs=3), output("other", 9)], 0.0, None
    )
    assert (await stopped.get()).finished
    assert "w9" in (await other.get()).outputs[0].text
    with pytest.raises(RuntimeError, match="could not be decoded to text"):
        await broken.get()
    assert done.reqs_to_abort == ["stopped"], "the core would go on with it"


def test_an_id_without_a_piece_has_a_text(processor: Any) -> None:
    """A SentencePiece vocabulary that is smaller than the model's (Phi-3: 32,011 of 32,064)."""
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    pieces = Tokenizer.from_str(
        '{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Metaspace", "replacement": "▁",'
        ' "prepend_scheme": "always", "split": true}, "model": {"type": "BPE", "vocab": {"▁a": 0, "b": 1},'
        ' "merges": []}}'
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
    assert convert_ids_list_to_tokens(tokenizer, [0, 1, 50])[1:] == ["b", ""]
