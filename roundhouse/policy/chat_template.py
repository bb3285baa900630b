"""The chat template of the policies made here: Hermes tool calls in ChatML, short enough for a tiny model.

Invariant: rendering only ever appends. With P = render(messages, add_generation_prompt) and G what the policy then generated,
rendering messages + [the message parsed from G] + anything begins with exactly P + G, if G is canonical: tool calls with JSON
spaced as `json.dumps` does it. (For other G the engine keeps the recorded tokens; see `roundhouse.generation.protocol`.)

    <|im_start|>system
    <tools>
    {"name": "calculate", "parameters": {"expression": "string"}}
    </tools><|im_end|>
    <|im_start|>user
    What is 3*4+5?<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "calculate", "arguments": {"expression": "3*4"}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    12
    </tool_response><|im_end|>
    <|im_start|>assistant

Of a tool's schema only the names and types of its arguments are shown: a policy trained from nothing cannot read
descriptions, and each token of the prompt costs time in every turn. Every tool result is a block of its own, so that a second
one appends. Content and tool call stand together without a separator, since the parser drops none.
"""

CHAT_TEMPLATE = r"""
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if messages and messages[0].role == 'system' else messages -%}
{%- if system or tools -%}
    {{- '<|im_start|>system\n' ~ system ~ ('\n' if system and tools else '') -}}
    {%- if tools -%}
        {{- '<tools>\n' -}}
        {%- for tool in tools -%}
            {%- set function = tool.function if tool.function is defined else tool -%}
            {{- '{"name": "' ~ function.name ~ '", "parameters": {' -}}
            {%- for name, schema in ((function.parameters or {})['properties'] or {}).items() -%}
                {{- (', ' if not loop.first else '') ~ '"' ~ name ~ '": "' ~ (schema['type'] or 'any') ~ '"' -}}
            {%- endfor -%}
            {{- '}}\n' -}}
        {%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in rest -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\n<tool_response>\n' ~ (message.content or '') ~ '\n</tool_response><|im_end|>\n' -}}
    {%- else -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments -%}
            {{- ('\n' if not loop.first else '') ~ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
            {{- (arguments if arguments is string else arguments | tojson) ~ '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()
