"""Chat templates in the manner of well-known families, and a tokenizer that knows their tokens.

Each shows one habit that rendering or reusing a cache has to cope with.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvchat.models.template import ChatTemplate
from kvchat.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ZooTemplate:
    """A template and the tokens it relies on."""

    source: str
    control_tokens: tuple[str, ...] = ()
    """Marked special in the tokenizer."""
    tags: tuple[str, ...] = ()
    """Added tokens not marked special, such as those around thinking."""
    bos_token: str = ""
    eos_token: str = ""
    accepts_system: bool = True
    alternates: bool = False
    """Refuses two messages of one role in a row."""
    extends: bool = True
    """The prompt of turn N begins that of turn N + 1."""

    def chat_template(self) -> ChatTemplate:
        """Return it ready to render."""
        return ChatTemplate(self.source, bos_token=self.bos_token, eos_token=self.eos_token)


CHATML = ZooTemplate(
    """\
{%- if not messages or messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nYou are a small, friendly program.<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
    {{- '<|im_start|>' ~ m['role'] ~ '\\n' ~ m['content'] ~ '<|im_end|>' ~ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""",
    control_tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    bos_token="<|im_start|>",
    eos_token="<|im_end|>",
)

LLAMA3 = ZooTemplate(
    """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '1 Jan 2024' %}
{%- endif %}
{%- set preamble = '' %}
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set preamble = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- macro header(name) %}
    {{- '<|start_header_id|>' + name + '<|end_header_id|>\\n\\n' }}
{%- endmacro %}
{{- header('system') + 'Knowledge ends: spring 2023\\nDate: ' + date_string + '\\n\\n' }}
{{- preamble + '<|eot_id|>' }}
{%- for m in messages %}
    {{- header(m.role) + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
""",
    control_tokens=(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ),
    bos_token="<|begin_of_text|>",
    eos_token="<|eot_id|>",
)

MISTRAL = ZooTemplate(
    """\
{%- set told = namespace(text=none) %}
{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set told.text = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn.role not in ['user', 'assistant'] %}
        {{- raise_exception('Only user and assistant may speak after the system prompt') }}
    {%- elif (turn.role == 'user') != (loop.index0 is divisibleby 2) %}
        {{- raise_exception('Turns must go user, assistant, user, assistant') }}
    {%- elif turn.role == 'user' %}
        {{- '[INST]' }}
        {%- if loop.last and told.text %}{{ told.text + '\\n\\n' }}{% endif %}
        {{- turn.content + '[/INST]' }}
    {%- else %}
        {{- turn.content + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    control_tokens=("<s>", "</s>", "[INST]", "[/INST]"),
    bos_token="<s>",
    eos_token="</s>",
    alternates=True,
    extends=False,
)

GEMMA = ZooTemplate(
    """\
{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'system' %}
{{ raise_exception('A system message is not supported') }}
{% endif %}
{% if (m['role'] == 'user') == (loop.index0 % 2 == 1) %}
{{ raise_exception('Roles must alternate, the user first') }}
{% endif %}
{% set who = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<start_of_turn>' + who + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\\n' }}
{%- endif %}
""",
    control_tokens=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    bos_token="<bos>",
    eos_token="<eos>",
    accepts_system=False,
    alternates=True,
)

QWEN3 = ZooTemplate(
    """\
{%- if tools %}
    {{- raise_exception('No tools here') }}
{%- endif %}
{%- set ns = namespace(last_asked=-1) %}
{%- for m in messages[::-1] %}
    {%- if m.role == 'user' and ns.last_asked < 0 %}
        {%- set ns.last_asked = messages|length - loop.index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role != 'assistant' %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {%- set reasoning = '' %}
    {%- if m.reasoning_content is string %}
        {%- set reasoning = m.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last_asked and (loop.last or reasoning) %}
        {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    control_tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    tags=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    eos_token="<|im_end|>",
)

DEEPSEEK = ZooTemplate(
    """\
{% set ns = namespace(system='') %}
{%- for m in messages if m['role'] == 'system' %}
    {%- set ns.system = ns.system + m['content'] %}
{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}
        {{- '<｜User｜>' + m['content'] }}
    {%- elif m['role'] == 'assistant' %}
        {%- set answer = m['content'] %}
        {%- if '</think>' in answer %}{% set answer = answer.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + answer + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
""",
    control_tokens=(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    tags=("<think>", "</think>"),
    bos_token="<｜begin▁of▁sentence｜>",
    eos_token="<｜end▁of▁sentence｜>",
    extends=False,
)

PHI3 = ZooTemplate(
    """\
{% for m in messages %}
{% if m['content'] %}{{ '<|' ~ m['role'] ~ '|>\\n' ~ m['content'] ~ '<|end|>\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
""",
    control_tokens=("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    bos_token="<s>",
    eos_token="<|endoftext|>",
)

PLAIN_INST = ZooTemplate(
    """\
{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}
{% set told = '<<SYS>>\\n' ~ messages[0]['content'] ~ '\\n<</SYS>>\\n\\n' %}
{% else %}
{% set turns = messages %}{% set told = '' %}
{% endif %}
{% for m in turns %}
{% if m['role'] == 'user' %}
{{ bos_token ~ '[INST] ' ~ (told if loop.first else '') ~ m['content'].strip() ~ ' [/INST]' }}
{%- else %}
{% generation %}{{ ' ' ~ m['content'].strip() ~ ' ' ~ eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
""",
    control_tokens=("<s>", "</s>"),
    bos_token="<s>",
    eos_token="</s>",
)

PARTS_ONLY = ZooTemplate(
    """\
{% for m in messages %}
<|im_start|>{{ m.role | capitalize }}:
{%- for part in m.content if part.type == 'text' %} {{ part.text }}{% endfor %}<end_of_utterance>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>Assistant:{% endif %}
""",
    control_tokens=("<|im_start|>", "<end_of_utterance>"),
    eos_token="<end_of_utterance>",
)

DROPS_SYSTEM = ZooTemplate(
    """\
{% for m in messages %}
{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endif %}
{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
""",
    control_tokens=("<|user|>", "<|assistant|>", "<|end|>"),
    eos_token="<|end|>",
    accepts_system=False,
)

ZOO = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "deepseek": DEEPSEEK,
    "phi3": PHI3,
    "plain-inst": PLAIN_INST,
    "parts-only": PARTS_ONLY,
    "drops-system": DROPS_SYSTEM,
}


def byte_tokenizer(zoo: ZooTemplate, *, add_bos_default: bool = False) -> Tokenizer:
    """Return a tokenizer with one token for each byte, and the template's added tokens."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in zoo.control_tokens]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(text, normalized=False) for text in zoo.tags])
    return Tokenizer(
        backend,
        bos_id=backend.token_to_id(zoo.bos_token),
        eos_token_id=backend.token_to_id(zoo.eos_token),
        add_bos_default=add_bos_default,
    )
