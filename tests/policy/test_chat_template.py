"""A template that hides messages of a run is refused before the run."""

import pytest

from roundhouse.environments import Calculator
from roundhouse.errors import ConfigError
from roundhouse.generation.chat import MessageForms, template_messages
from roundhouse.policy.model_directory import ChatTemplate, refuse_unfit_template
from roundhouse.policy.tokenizer import CHAT_TEMPLATE, blank_tokenizer
from roundhouse.rollout.responses import chat_tools

TOOLS = chat_tools(Calculator().tool_schemas())
OURS = CHAT_TEMPLATE + "{# rendered, since it is not quite ours #}"
PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's, less its system message: no word of tools."""


def refused(template: str, tools: list) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_unfit_template(ChatTemplate("model", template), tools)
    return str(caught.value)


def test_our_own_template_shows_tools_and_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_unfit_template(ChatTemplate("ours", OURS), TOOLS)
    monkeypatch.delattr(ChatTemplate, "render")
    refuse_unfit_template(ChatTemplate("ours", CHAT_TEMPLATE), TOOLS)


def test_a_template_that_ignores_tools_is_refused_only_where_tasks_have_some() -> None:
    refuse_unfit_template(ChatTemplate("plain", PLAIN), [])
    assert "ignores tools: calculate is not in the prompt" in refused(PLAIN, TOOLS)
    assert "policy.chat_template: hermes" in refused(PLAIN, TOOLS)


@pytest.mark.parametrize(
    ("template", "tools", "what"),
    [
        ("{{ messages[0]['content'] }}", [], "omits messages of the user or the assistant"),
        ("{{ raise_exception('only one turn') }}", [], "refuses the roles user, assistant: only one turn"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content ~ tools }}{% endfor %}",
            TOOLS,
            "what a tool returns",
        ),
    ],
)
def test_what_a_template_drops_is_named(template: str, tools: list, what: str) -> None:
    assert what in refused(template, tools)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, OURS, PLAIN], ids=["hermes", "ours", "plain"])
def test_a_template_whose_end_of_turn_the_tokenizer_lacks_is_refused(template: str) -> None:
    base, chat = frozenset({"<|endoftext|>"}), frozenset({"<|endoftext|>", "<|im_end|>"})
    refuse_unfit_template(ChatTemplate("chat", template, added=chat), [])
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>', which is not a token of the tokenizer"):
        refuse_unfit_template(ChatTemplate("base", template, added=base), [])


def test_a_template_without_the_system_prompt_is_refused() -> None:
    said = "Answer briefly."
    refuse_unfit_template(ChatTemplate("ours", OURS), TOOLS, said)
    without = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"leaves out the system prompt 'Answer briefly\.' .*Unset it"):
        refuse_unfit_template(ChatTemplate("model", without), [], said)


def test_no_content_beside_a_call_is_empty_text_for_templates_that_break_on_null() -> None:
    tokenizer = blank_tokenizer()
    assert MessageForms.of_template(tokenizer) == MessageForms()
    for broken in (PLAIN, PLAIN.replace("+ message['content'] +", "~ message['content'] ~")):
        tokenizer.chat_template = broken
        assert MessageForms.of_template(tokenizer) == MessageForms("")
    call = {"role": "assistant", "content": None, "tool_calls": []}
    assert template_messages([call])[0]["content"] is None
    assert template_messages([call], MessageForms(""))[0]["content"] == ""


def test_arguments_are_text_for_templates_that_refuse_an_object() -> None:
    tokenizer = blank_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    forms = MessageForms.of_template(tokenizer)
    assert forms == MessageForms(None, text_arguments=True)
    for arguments in ({"a": 2}, '{"a": 2}'):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        assert template_messages([call], forms)[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 2}'
