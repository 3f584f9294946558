"""The arguments that a request may give a chat template.

`chat_template_kwargs` of a request reach more than the template: transformers passes them to its tokenizer,
too, where `padding` and `max_length` make a prompt of any length. So only variables of templates are allowed.
"""

from __future__ import annotations

import re

# Variables of known models' templates, except those with their own field in requests.
TEMPLATE_ARGUMENTS = frozenset(
    {
        *("enable_thinking", "thinking", "thinking_budget", "thinking_mode", "enable_reasoning", "reasoning"),
        *("reasoning_effort", "preserve_thinking", "clear_thinking", "keep_past_thinking", "low_effort"),
        *("truncate_history_thinking", "force_reasoning", "force_nonempty_content", "add_vision_id"),
        *("model_identity", "date_string", "current_date", "tools_in_user_message", "safety_mode"),
        *("citation_mode", "citations", "hallucinations", "length", "originality", "add_thinking_prompt"),
    }
)
# Names that a setting may not add: arguments of transformers' tokenizers and of vLLM's renderers, fields of
# requests, and variables that every template gets.
RESERVED_ARGUMENTS = frozenset(
    {
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs", "text", "text_pair"),
        *("text_target", "text_pair_target", "pair", "add_special_tokens", "stride", "is_split_into_words"),
        *("pad_to_multiple_of", "padding_side", "return_token_type_ids", "return_attention_mask", "verbose"),
        *("return_overflowing_tokens", "return_special_tokens_mask", "return_offsets_mapping", "pad_token"),
        *("return_length", "padding_strategy", "truncation_strategy", "split_special_tokens", "unk_token"),
        *("encoded_inputs", "model_config", "tokenizer", "tool_choice", "response_format", "bos_token"),
        *("eos_token", "raise_exception", "strftime_now", "processor_kwargs", "load_audio_from_video"),
        *("images", "videos", "audio", "video_load_backend", "num_frames", "video_fps", "sampling_rate"),
        *("template_kwargs",),
    }
)


def template_arguments_of(setting: str) -> frozenset[str]:
    """The arguments that any request may give, with those that a comma-separated setting adds.

    Raises ValueError for an invalid variable name, or one that reaches more than a template.
    """
    added = {part.strip() for part in setting.split(",") if part.strip()}
    for name in sorted(added):
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
            raise ValueError(
                f"expected names of chat templates' variables, separated by commas; got {name!r}"
            )
        if name in RESERVED_ARGUMENTS:
            raise ValueError(
                f"{name!r} is an argument of the tokenizer or a field of requests, so requests cannot set it "
                "as a template's variable; rename the variable in the template"
            )
    return TEMPLATE_ARGUMENTS | added
