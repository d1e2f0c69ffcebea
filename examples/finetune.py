"""Fine-tune a causal language model of Hugging Face, in a local folder, on the text files of a folder.

    hf download gpt2 --local-dir gpt2
    rallypoint run --workers 2 --servers 1 examples/finetune.py --model gpt2 --data texts

Needs `pip install 'rallypoint[huggingface]'`. The folder `tuned` is for `AutoModelForCausalLM.from_pretrained`.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rallypoint as rp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", type=Path, required=True, help="as save_pretrained has written it, with its tokenizer")
parser.add_argument("--data", type=Path, required=True, help="all *.txt in this folder and those in it")
parser.add_argument("--out", type=Path, default=Path("tuned"), help="folder for the model (tuned)")
parser.add_argument("--steps", type=int, default=200, help="updates (200)")
parser.add_argument("--block", type=int, default=128, help="tokens in a window (128)")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
model = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True)
model = model.to("cuda" if torch.cuda.is_available() else "cpu").train()
text = "\n".join(path.read_text(errors="replace") for path in sorted(options.data.rglob("*.txt")))
tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
windows = tokens[: len(tokens) // options.block * options.block].view(-1, options.block)
held_out = torch.arange(len(windows)) % 20 == 0  # for validation

with rp.join() as job:
    run = job.train(
        model, windows[~held_out], replicas=2, batch=4, steps=options.steps, clip=1.0,
        reading=rp.Reading(item="tokens", items_per_sample=options.block),
        optimizer=rp.AdamW(lr=rp.cosine(1e-4, warmup=20))
    )  # fmt: skip

    @run.every(50)
    def validate(step: int) -> dict[str, float]:
        some = windows[held_out][:64].to(model.device)
        losses = [float(model(input_ids=x, labels=x).loss) * len(x) for x in torch.split(some, 8)]
        return {"val_loss": sum(losses) / len(some)}

    for micro in run:
        with micro:
            micro.backward(model(input_ids=micro.batch, labels=micro.batch).loss)
    if run.lead:
        model.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
