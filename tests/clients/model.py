"""The default model with a chat template that shows it tools, so that clients can offer them without forcing a call."""

from pathlib import Path
from typing import Final

from headrace_engine.checkpoints import default_model

NAME: Final = "smollm2-with-tools"
# ChatML in the format that `hermes` reads
_TEMPLATE: Final = """
{%- if tools %}<|im_start|>system
You may call these functions:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
A call looks so:
<tool_call>
{"name": "function", "arguments": {}}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_model_with_tools(folder: Path) -> Path:
    """Make the model's folder in `folder`; the files of the default model are links."""
    made = folder / NAME
    made.mkdir()
    for file in default_model.fetch().iterdir():
        if file.name != "chat_template.jinja":
            (made / file.name).symlink_to(file)
    (made / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return made
