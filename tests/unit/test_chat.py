"""Chat templates render as transformers renders them, and a template's refusal is a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.gateway.text.chat_template import ChatTemplate, special_tokens
from tapeout.errors import ArtifactError, RequestError

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('ParentTypes must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]
    {%- else %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
    {%- if message.content == '' %}{%- break %}{%- endif %}
{%- endfor %}
"""
TOOLS = """{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}{{ messages[-1].content | tojson }}"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "user", "content": "  Hi <b>there</b> & 'you' "},
    {"role": "assistant", "content": "Olá 🙂"},
    {"role": "user", "content": "Again"},
]


def transformers_renders(source: str, messages: list[dict[str, str]], tools: Any, add_generation_prompt: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
    )
    return rendered[0][0]


@pytest.mark.parametrize("source", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_is_that_of_transformers(source: str, add_generation_prompt: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "a < b"}}]
    expected = transformers_renders(source, TALK, tools, add_generation_prompt)
    ours = ChatTemplate(source, SPECIAL).render(TALK, tools=tools, add_generation_prompt=add_generation_prompt)
    assert ours == expected


def test_a_template_that_objects_is_a_clear_error() -> None:
    with pytest.raises(RequestError, match="ParentTypes must alternate"):
        ChatTemplate(LLAMA, SPECIAL).render([TALK[0], TALK[0]])


@pytest.mark.parametrize("source", ["{{ ().__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[9].role }}"])
def test_a_hostile_or_broken_template_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="refused"):
        ChatTemplate(source, {}).render(TALK)


def test_invalid_jinja_names_the_line() -> None:
    with pytest.raises(RequestError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


def test_messages_must_be_plain_values() -> None:
    with pytest.raises(RequestError, match="holds PosixPath"):
        ChatTemplate(CHATML, {}).render([{"role": "user", "content": Path("/")}])
    with pytest.raises(RequestError, match="empty"):
        ChatTemplate(CHATML, {}).render([])


def test_special_tokens_are_read_in_both_forms(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert ChatTemplate.load(tmp_path).render([{"role": "user", "content": "x"}]) == "<s>x"


def test_a_model_without_a_chat_format_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--raw"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    with pytest.raises(ArtifactError, match=r"no tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)
