"""mini-swe-agent: a program for `environment.kind: command` (docs/agent-harnesses.md).

LiteLLM reads OPENAI_BASE_URL and OPENAI_API_KEY. The policy's commands run as your user in the program's directory, without
isolation. For a policy that you do not trust, use an environment of mini-swe-agent in a container.
"""

import json
import os

os.environ |= {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": os.getcwd(),  # a file of the user would replace the variables of the rollout
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # a failed call fails the rollout, which is retried
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the map is downloaded otherwise
}
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

END = "Run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo <answer>` when you have the answer."

with open(os.environ["ROUNDHOUSE_TASK"]) as file:
    question = json.load(file)["question"]
agent = DefaultAgent(
    LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors"),
    LocalEnvironment(),
    system_template=f"Answer by commands of bash. {END}",
    instance_template="{{task}}",
    step_limit=8,
)
print(agent.run(question)["submission"])
