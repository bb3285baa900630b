import sys

from datasets import load_dataset
from rewards import correct
from trl import GRPOConfig, GRPOTrainer

rows = load_dataset("json", data_files="rows.jsonl", split="train").rename_column("question", "prompt")
trainer = GRPOTrainer(
    model="model",
    reward_funcs=correct,
    train_dataset=rows,
    args=GRPOConfig(
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=16,
        max_steps=2,
        logging_steps=1,
        save_steps=1,  # e
        log_completions=True,  # f
        report_to="tensorboard",  # j
    ),
)
trainer.train(resume_from_checkpoint="resume" in sys.argv)  # e
trainer.save_model("trained")  # g
