"""The completions that TRL's GRPOTrainer logs in two steps: `python trl_completions.py DIRECTORY`."""

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def length(completions, **kwargs):
    return [float(len(each[0]["content"])) for each in completions]


def ones(completions, log_extra, **kwargs):
    log_extra("seen", [f"text {len(each[0]['content'])}" for each in completions])
    return [each[0]["content"].count("one") if "two" in each[0]["content"] else None for each in completions]


def main(directory: str) -> None:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "one": 2, "two": 3, "six": 4}, unk_token="one"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="one")
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    rows = [{"prompt": [{"role": "user", "content": f"one two {'six ' * number}"}]} for number in range(1, 5)]
    GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=5, **sizes)),
        reward_funcs=[length, ones],
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=directory,
            report_to=[],
            use_cpu=True,
            bf16=False,
            max_steps=2,
            logging_steps=1,
            log_completions=True,
            save_strategy="no",
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
        ),
    ).train()


if __name__ == "__main__":
    main(sys.argv[1])
