"""A tiny causal language model with random weights, on random tokens."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (40, 8))]
args = TrainingArguments(
    "checkpoints", per_device_train_batch_size=2, num_train_epochs=2, learning_rate=0.01, warmup_steps=3,
    eval_strategy="epoch", save_strategy="epoch", logging_steps=5, report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])
trainer.train()
trainer.save_model("model")
