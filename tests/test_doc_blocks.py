"""Every block of code in README.md and docs/*.md is run, or the table here says in a sentence why it is not.

A block of Python is a fragment: `PREAMBLE` and its `Fragment` make a program of it. Each of its statements must run.
A block of commands is played line by line in a folder of its own, and must print what the page shows. What is not
played is still read by the product's own command line.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from rallypoint.cli import app
from rallypoint.cli.given import check_recipe, without_settings
from rallypoint.launch.options import RunOptions, read_topology
from support.programs import run_program

ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent
PAGES = {page.stem: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
STEPS = 4  # in place of each steps= of three digits or more
FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})(.*)$")
COMMAND = re.compile(
    r"^\s*(?:\$|\w+=\S* |export |(?:rallypoint|python3?|pip|torchrun|mpirun|sbatch|kubectl|docker)\b)", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its language ("" without one), its lines, and the number of the first."""

    page: str
    language: str
    code: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_in(page: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a page, also those in lists."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if (fence := FENCE.match(lines[at])) is not None:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence[2])
            code = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
            yield Block(page, fence[3].strip(), code, at + 2)
            at = end
        at += 1


# ---- The table ----


@dataclass(frozen=True)
class Fragment:
    """A block of Python that is run, between `before` and `after`.

    Attributes:
        before, after: Python around it. `after` says what must have come of it, where an error would not.
        swap: what is replaced, each exactly once: sizes, and places that are not on this machine.
        under: the command that starts it; "": it runs alone, in one process with others.
        first: commands that are played before.
        slow: not in `make test`.
    """

    before: str = ""
    after: str = ""
    swap: Mapping[str, str] = field(default_factory=dict)
    under: str = ""
    first: tuple[str, ...] = ()
    slow: bool = False


@dataclass(frozen=True)
class Commands:
    """A block of commands that is played. What it shows (its own lines, or the `text` block after it) is printed.

    Attributes:
        left_out: the beginnings of lines that are not played, and why.
        swap: what is replaced, each exactly once.
        first: commands that are played before; one that begins with "! " has to fail.
        columns: of the terminal.
        exact: the numbers that it shows are the same too.
        fails: the commands end with another status than 0.
        unlike: why something else is printed than what it shows.
        says: a pattern of what is printed.
        slow: not in `make test`.
    """

    left_out: Mapping[str, str] = field(default_factory=dict)
    swap: Mapping[str, str] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    columns: int = 160
    exact: bool = False
    fails: bool = False
    unlike: str = ""
    says: str = ""
    slow: bool = True


@dataclass(frozen=True)
class By:
    """Another test runs the block: ``FILE.py::NAME``."""

    test: str


@dataclass(frozen=True)
class NotRun:
    """The block is only read."""

    why: str


Entry = Fragment | Commands | By | NotRun

# Of fragments; `more` are the arguments for which a page has three dots.
PREAMBLE = """
import glob, os, random, torch, torch.nn.functional as F
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
import rallypoint as rp

def RAN(number, seen=set()):
    if number not in seen:
        seen.add(number)
        with open(RAN_FILE, "a") as ran:
            ran.write(f"{number}\\n")

class Net(torch.nn.Module):
    def __init__(self, *config):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = F.relu(block(x))
        return self.head(self.norm(x))

def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

class Jobs:
    '''`job` of a fragment: each `job.train` is a job of its own, and its loop is run if the fragment has none.'''
    open, run, ranks = None, None, 1

    def train(self, model, *given, **named):
        self.end()
        self.open, self.model = rp.join(), model
        self.run = self.open.train(model, *given, **named)
        return self.run

    def store(self, *given, **named):
        self.open = rp.join()
        return self.open.store(*given, **named)

    def end(self):
        if self.run is not None and not self.run._started:
            for micro in self.run:
                with micro:
                    micro.backward(loss_of(self.model, micro.batch))
        if self.open is not None:
            self.open.__exit__(None, None, None)
        self.open = self.run = None

torch.manual_seed(0)
L = torch.nn.Linear
model, loss_fn, job, more = Net(), loss_of, Jobs(), {}
dataset = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
"""
SMALL = {"batch=64": "batch=4"}
PAD = "pad = torch.utils.data.default_collate"
CLUSTER = "rallypoint run --workers 2 --servers 1"
WIDE = "model = torch.nn.Sequential(L(8, 512), *(L(512, 512) for _ in range(4)))"  # more shards than fragments
GIVEN = ")\njob.train(model, dataset, **given, batch=4, steps=16)"
FLAT = """
def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters())
def load(model, values):
    torch.nn.utils.vector_to_parameters(values, model.parameters())
"""
PARTS = """
import pyarrow, pyarrow.parquet, fsspec, io, tarfile
with fsspec.open("memory://bucket/clicks/a.parquet", "wb") as file:
    pyarrow.parquet.write_table(pyarrow.table({"x": [float(n) for n in range(64)]}), file, row_group_size=4)
with fsspec.open("memory://bucket/train-0.tar", "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
    for n in range(4):
        one = tarfile.TarInfo(f"{n}.cls")
        one.size = 1
        tar.addfile(one, io.BytesIO(b"3"))
"""
RNN = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
        self.rnn = torch.nn.GRU(4, 4, batch_first=True)
    def init_hidden(self, batch):
        return torch.zeros(1, batch, 4)
    def forward(self, x, hidden):
        output, hidden = self.rnn(self.embed(x), hidden)
        return self.out(output), hidden
model, loss_fn, tokens = Net(), F.cross_entropy, torch.randint(9, (40_000,))
"""
GAN = f"""{FLAT}
d, g = torch.nn.Linear(2, 1), torch.nn.Linear(1, 2)
def gradient(model, loss):
    return torch.nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))
def gradient_of_d(d, g):
    return gradient(d, d(g(torch.randn(4, 1))).mean() - d(torch.randn(4, 2)).mean())
def gradient_of_g(d, g):
    return gradient(g, -d(g(torch.randn(4, 1))).mean())
"""
# The train.py of commands.
TRAIN = """
import pathlib
import torch, torch.nn.functional as F, rallypoint as rp
torch.manual_seed(0)
L = torch.nn.Linear
model = torch.nn.Sequential(L(8, 8), L(8, 8), L(8, 8), L(8, 8), L(8, 4))
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
times = pathlib.Path("times")  # "7 2 1000": at step 7 the loss of replica 2 is a thousand times as high
step, replica, factor = map(float, (times.read_text() if times.exists() else "-1 -1 1").split())
audit = rp.Audit(fingerprints=3)
with rp.join() as job:
    run = job.train(model, data, replicas=4, batch=4, steps=16, optimizer=rp.AdamW(lr=1e-3), clip=1.0, audit=audit)
    for micro in run:
        with micro:
            loss = F.cross_entropy(model(micro.batch[0]), micro.batch[1])
            if (micro.step, micro.replica) == (step, replica):
                loss = loss * factor
            micro.backward(loss)
"""
RUN = "runs/20260131-235959"
TRAINED = f"rallypoint run --workers 2 --servers 1 --folder {RUN} --snapshot-steps 5 --keep-last 9 train.py"
INSTALLS = "it would change the environment of the tests"
SMALL_GPT = "--layers 1 --width 16 --heads 2 --block 16 --batch 2"
RANKS = "rallypoint run --workers 1 --servers 1 --ranks 2"
THE_README = By("test_shown_code.py::test_the_readmes_code_ends_with_the_same_bytes_alone_and_on_a_cluster")
BY_HAND = By("test_by_hand.py::test_the_documented_commands_make_a_cluster_that_says_how_it_gets_on")
THE_TUTORIAL = By("test_tutorial.py::test_the_tutorial_ends_with_the_same_bytes")
MANIFESTS = By("kubernetes/test_examples.py::test_what_the_docs_have_for_trainer_and_kuberay_is_known_there")
PLANTED = "the lines are of a machine that computes wrong: tests/audits plants one"
TABLE: dict[str, dict[str, Entry]] = {
    "README": {
        "pip install torch": NotRun(INSTALLS),
        "import torch\n": THE_README,
        "rallypoint run --workers 4": Commands(
            swap={"--workers 4": "--workers 2"}, says=r"(weights sha256 \w+\n)(.*\n)*\1",
        ),
        "-torch.distributed": By("test_doc_blocks.py::test_both_sides_of_the_difference_train"),
        "rallypoint chaos": Commands(
            swap={"kills 3": "kills 3 --heartbeat 1", "steps 150": f"steps 400 --validate-every 400 {SMALL_GPT}"},
            says="same bytes: yes\n",
        ),
    },
    "audits": {"$ rallypoint run": Commands(swap={"--workers 8": "--workers 2"}, unlike=PLANTED)},
    "by-hand": {"rallypoint token": BY_HAND},
    "checkpoints": {
        "import torch.distributed.checkpoint": Fragment(
            before="""
                model = torch.nn.Sequential(L(8, 8), L(8, 8), L(8, 8), L(8, 8), L(8, 4))
                first = model[4].weight.clone()
                norms = [p for p in model.parameters() if p.ndim < 2]
                optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.ndim > 1]},
                                               {"params": norms, "weight_decay": 0.0}], lr=1.0)
            """,
            after="""
                assert not torch.equal(model[4].weight, first)
                assert optimizer.state[model[4].weight]["step"] == 16
                assert optimizer.param_groups[0]["lr"] == 1e-3
            """,
            first=(
                "rallypoint run --workers 1 --servers 1 --folder runs/mine train.py",
                "rallypoint export runs/mine --to checkpoint --format dcp",
            ), slow=True,
        ),
    },
    "compression": {
        "run = job.train(model, dataset, codec=rp.Int8()": Fragment(before="more = dict(steps=2, batch=4)"),
        "rallypoint train gpt --set codec.type=powersgd": Commands(swap={
            "gpt --set codec.type=powersgd": f"gpt {SMALL_GPT} --steps 2 --set codec.type=powersgd",
            "gpt --set codec.type=int8": f"gpt {SMALL_GPT} --steps 2 --set codec.type=int8",
        }),
    },
    "data": {
        "loader = DataLoader(dataset": Fragment(PAD, swap={"workers=4": "workers=1", "batch_size=64": "batch_size=4"}),
        "run = job.train(model, dataset, batch=64": Fragment(PAD, swap={**SMALL, "workers=4": "workers=1"}),
    },
    "ddp": {
        "import rallypoint.bridges.ddp as servers": Fragment(
            before="from torch.nn.parallel import DistributedDataParallel",
            after="""
                ddp(torch.full((1, 8), float(state.rank))).sum().backward()
                assert state.reducer.made > 0
            """, under=CLUSTER, slow=True,
        ),
        "import rallypoint.bridges.c10d       ": Fragment(
            after="""
                values = torch.full((3,), 1.0 + torch.distributed.get_rank())
                torch.distributed.all_reduce(values)
                assert values.tolist() == [3.0, 3.0, 3.0]
            """, under=CLUSTER, slow=True,
        ),
        "import rallypoint.bridges.c10d\nimport torch": Fragment(
            before="""
                from accelerate import Accelerator
                optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=8)
            """,
            after="""
                from rallypoint.bridges.joining import sums
                for batch in loader:
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                assert sums().reducer.made > 0
            """, under=CLUSTER, slow=True,
        ),
    },
    "debugging": {
        f"$ rallypoint replay {RUN} --step 12": Commands(first=(TRAINED,)),
        f"$ rallypoint replay {RUN} --find-spike": Commands(first=("echo 7 2 1000 > times", TRAINED)),
        "$ rallypoint replay runs/clean runs/demo": Commands(first=(
            TRAINED.replace(RUN, "runs/clean"), "echo 3 1 9 > times", TRAINED.replace(RUN, "runs/demo"),
        ), fails=True),
        "RALLYPOINT_RECORD=recordings": Commands(swap={"--workers 4": "--workers 2"}),
        "from support.replay import replay": Fragment(
            before="""
                os.environ["RALLYPOINT_RECORD"] = "tests/recordings"
                job.train(model, dataset, replicas=2, batch=4, steps=2)
                job.end()
                (recorded,) = Path("tests/recordings").glob("server0-*.1.recording")
            """, swap={'"tests/recordings/server0-4711.1.recording"': "recorded"},
            after="""
                test_the_server_that_published_too_early_answers_as_it_should()
                del os.environ["RALLYPOINT_RECORD"]
            """,
        ),
        "print(simulate(train": Fragment(before="""
            from rallypoint.testing import simulate
            def train():
                torch.manual_seed(0)
                model = Net()
                with rp.join() as job:
                    for micro in job.train(model, dataset, replicas=2, batch=4, steps=4):
                        with micro:
                            micro.backward(loss_of(model, micro.batch))
        """),
    },
    "diloco": {
        "run = job.train(": Fragment(swap={**SMALL, "warmup=100": "warmup=2", "20_000": "16"}),
        "sync=rp.LocalSteps(steps=16, fragments=4)  ": Fragment(f"{WIDE}\ngiven = dict(", GIVEN),
        "sync=rp.LocalSteps(steps=16),\ngroups": Fragment("given = dict(", GIVEN),
        "sync=rp.LocalSteps(steps=16, fragments=4, delay=2)": Fragment(f"{WIDE}\ngiven = dict(", GIVEN),
    },
    "embeddings": {
        "users = torch.nn.Embedding": Fragment(
            after="""
                class Both(torch.nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.users, self.head = users, torch.nn.Linear(32, 4)
                    def forward(self, rows):
                        return self.head(self.users(rows))
                job.train(Both(), TensorDataset(torch.randint(50, (64,)), dataset.tensors[1]), batch=4, steps=2)
            """, swap={"50_000_000": "50"},
        ),
    },
    "failures": {"rallypoint chaos": NotRun("40 kills take minutes: it is `make chaos`, and the README's is played")},
    "files": {
        'data = rp.Parquet("s3://bucket/clicks", cache=': Fragment(
            before=PARTS,
            after="""
                assert data[0]["cls"] == b"3"
                assert len(data) == 4
            """,
            swap={
                "s3://bucket/clicks": "memory://bucket/clicks", "s3://bucket/train": "memory://bucket/train",
                'cache="/scratch': 'cache="scratch', 'Cache("/scratch': 'Cache("scratch',
            },
        ),
        "run = job.train(model, rp.Parquet(": Fragment(
            before=PARTS + """
model, more = torch.nn.Linear(1, 1), dict(steps=2)
def loss_of(model, batch):
    return model(batch["x"].float()[:, None]).square().mean()
            """, swap={**SMALL, "s3://": "memory://"},
        ),
    },
    "kubernetes": {"apiVersion: trainer.kubeflow.org": MANIFESTS, "apiVersion: ray.io": MANIFESTS},
    "loops": {
        "data = rp.Lanes(": Fragment(before=RNN, swap={"steps=...": "steps=3"}),
        "store = job.store({": Fragment(before=GAN, swap={"10_000)": "3)"}),
    },
    "memory": {
        "with torch.device(": Fragment(before="""
            GPT, config, more, begun = Net, None, dict(steps=2, batch=4), []
            init_weights = begun.append
        """, after="assert model.head in begun"),
    },
    "modes": {
        "run = job.train(model, dataset, replicas=8": Fragment(before="""
            def split(model):
                return ([p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2])
        """, swap={"warmup=100": "warmup=2"}),
    },
    "optimizers": {
        "$ jq": Commands(first=(TRAINED.replace(RUN, "runs/mine"),), says=r"^\[15,\d\.\d+\]$"),
        "rates = rp.tabulated": Fragment(after="assert run.config.optimizer.lr.rates[:2] == (1e-5, 2e-5 * 0.9995)"),
    },
    "parallelism": {
        "rallypoint run --workers 2": NotRun("eight processes that import torch: the blocks below run with two"),
        "with rp.join() as job:": Fragment(
            before="""
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard
                device, loss_fn = "cpu", F.cross_entropy
            """, under=RANKS, swap={"steps=100": "steps=3"}, slow=True,
        ),
        "stage = PipelineStage(": Fragment(
            before="""
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.pipelining import PipelineStage, Schedule1F1B
                device, job, loss_fn = torch.device("cpu"), rp.join(), F.cross_entropy
                pp = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))["pp"]
                class Net(torch.nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
                    def forward(self, x):
                        for part in filter(None, (self.first, self.second)):
                            x = part(x)
                        return x
                model = Net()
                if pp.get_local_rank() == 0:
                    model.second = None
                else:
                    model.first = None
                run = job.train(model, dataset, replicas=2, batch=8, steps=3, parallel=rp.Parallel(pp))
            """, after="job.__exit__(None, None, None)", under=RANKS, slow=True,
        ),
    },
    "planning": {
        "rallypoint plan --model": Commands(columns=100, exact=True, slow=False),
        "rallypoint plan runs": Commands(first=(TRAINED,)),
    },
    "precision": {
        'run = job.train(model, dataset, precision="bf16"': Fragment(before="more = dict(steps=2, batch=4)"),
        'run = job.train(model, dataset, precision="fp16"': Fragment(before="more = dict(steps=2, batch=4)"),
        "fast = torch.compile": Fragment(
            before="more = dict(steps=2, batch=4)", slow=True,
            swap={"dynamic=False": 'dynamic=False, backend="aot_eager"'},
        ),
    },
    "prometheus": {
        "pip install": Commands(left_out={"pip": INSTALLS}),
        "cp -r": Commands(left_out={"prometheus ": "test_watch_prometheus.py starts it"}),
        "rallypoint token": Commands(left_out={"RALLYPOINT_METRICS_TOKEN_FILE": "it needs a coordinator at 10.0.0.7"}),
    },
    "ray": {
        "from rallypoint.bridges.ray": Fragment(
            before="""
                import atexit
                from engines.ray_nodes import ray_nodes
                from ray.train import RunConfig, ScalingConfig
                nodes = ray_nodes(4)
                nodes.__enter__()
                atexit.register(nodes.__exit__, None, None, None)
                data = dataset
            """,
            after='assert list(Path("results").glob("*/rallypoint/snapshots/step-00000016-*"))',
            swap={'"/shared/results"': 'str(Path("results").resolve())', "(2, 8)": "(1, 2)"}, slow=True,
        ),
    },
    "runs": {
        "export RALLYPOINT_COORDINATOR": NotRun("it joins a job under way: test_launch.py does"),
        "RALLYPOINT_NEAR=rack2": NotRun("it needs a coordinator at 10.0.0.7"),
        "failed: worker0: the loss": Commands(first=("echo 7 0 nan > times", f"! {TRAINED}", "rm times")),
    },
    "scale": {
        "python benchmarks/simulate.py --workers 1000": Commands(exact=True),
        "python benchmarks/simulate.py --workers 8": Commands(),
    },
    "sites": {"run = job.train(": Fragment(WIDE, swap={**SMALL, "20000": "16"})},
    "store": {
        "import torch, rallypoint": Fragment(
            before="""
                def gradient(weights, step, contributor):
                    return weights - contributor
            """, swap={"steps=500": "steps=3", "due(\"weights\", 500)": "due(\"weights\", 3)"},
        ),
        "store = job.store({": Fragment(
            before=FLAT + """
net = torch.nn.Linear(2, 2)
def sample(step, contributor):
    return torch.tensor([[step, 7], [7, contributor]])
def gradient(values):
    assert values.shape == (2, 2, 32)
    return values
            """, swap={"50_000_000": "50", "1000)": "3)"},
        ),
    },
    "streams": {
        "files = sorted(": Fragment(
            before="""
                Path("text").mkdir()
                for n in range(8):
                    Path(f"text/{n}.txt").write_text("".join(f"{n * m}\\n" for m in range(8)))
                def tokenize(line):
                    return torch.full((8,), float(line)), int(line) % 4
                more = {}
            """, swap={**SMALL, "100_000": "20"}, after="job.end()\nassert run.step == 6",
        ),
    },
    "topology": {"# topology.toml": By("test_doc_blocks.py::test_the_topology_is_read")},
    "trackers": {
        "pip install 'rallypoint[tensorboard]'": Commands(
            left_out={"pip": INSTALLS, "tensorboard ": "it serves until Ctrl-C"},
        ),
        "pip install 'rallypoint[wandb]'": NotRun("the tests' environment has neither: test_watch_tracking_stores.py"),
    },
    "trainers": {
        "from rallypoint.bridges.lightning": Fragment(
            before="""
                import lightning
                class Module(lightning.LightningModule):
                    def __init__(self):
                        super().__init__()
                        self.net = Net()
                    def training_step(self, batch, number):
                        return loss_of(self.net, batch)
                    def configure_optimizers(self):
                        return torch.optim.SGD(self.parameters(), lr=0.1)
            """,
            after="""
                trainer.fit(Module(), DataLoader(dataset, batch_size=16))
                assert trainer.global_step == 12
            """, slow=True,
        ),
        "from rallypoint.bridges.huggingface": Fragment(
            after="""
                from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
                model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
                data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 8))]
                args = TrainingArguments("out", per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True)
                trainer = Trainer(model=model, args=args, train_dataset=data)
                trainer.train()
                assert trainer.state.global_step == 4
            """, slow=True,
        ),
    },
    "training": {
        "run = job.train(model, dataset, replicas=8": Fragment(swap={"batch=32": "batch=4"}),
        "run = job.train(model, dataset, steps=20_000": Fragment(
            before="""
                def validation_loss(model):
                    return float(loss_of(model, dataset.tensors))
            """, swap={"warmup=100": "warmup=2", "every(100)": "every(4)"},
        ),
    },
    "troubleshooting": {
        "$ rallypoint report": Commands(first=(TRAINED,), unlike="the line is of a run that stands still"),
    },
    "tuning": {"run = job.train(": Fragment(swap=SMALL)},
    "tutorial": {
        "import torch\nimport torch.nn": THE_TUTORIAL, "import torch\nfrom safetensors": THE_TUTORIAL,
        "rallypoint run --workers 3": THE_TUTORIAL, "ps --ppid": THE_TUTORIAL, "kill -9": THE_TUTORIAL,
        "rallypoint snapshot": THE_TUTORIAL, "rallypoint resume": THE_TUTORIAL, "rallypoint stop": THE_TUTORIAL,
        "python use.py": THE_TUTORIAL, "STEPS=": THE_TUTORIAL,
    },
    "usage": {
        "import rallypoint as rp\n": Fragment(
            before="""
                saved = []
                def evaluate(model):
                    return float(loss_of(model, dataset.tensors))
                def save(model, folder):
                    saved.append(folder)
            """,
            after="assert saved == [Path.cwd()]",
            swap={**SMALL, "warmup=100": "warmup=2", "every(200)": "every(4)"},
        ),
    },
    "watching": {
        "pip install": Commands(left_out={"pip": INSTALLS, "rallypoint watch": "it serves the page until Ctrl-C"}),
        "$ rallypoint watch": Commands(first=(TRAINED,)),
    },
    "wrap": {
        "optimizer = torch.optim.AdamW": Fragment(
            before="""
                max_iters = 4
                def get_batch(step, rank, world):
                    return [one[rank::world] for one in dataset.tensors]
                loss_of = F.cross_entropy
            """, swap={"lr=3e-4)\n": "lr=3e-4)\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)\n"},
            after="assert optimizer.over\nassert 2.9e-5 < scheduler.get_last_lr()[0] < 3.1e-5",
        ),
        "for epoch, batch in optimizer.epochs(loader)": Fragment(
            before="""
                loader = DataLoader(dataset, batch_size=16)
                optimizer = rp.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=8)
            """, after="assert (epoch, optimizer.over) == (1, True)",
        ),
    },
}


# ---- What a block has, and what becomes of it ----


@cache
def every_block() -> tuple[Block, ...]:
    return tuple(block for page, path in PAGES.items() for block in blocks_in(page, path.read_text()))


def entries_of(block: Block) -> list[Entry]:
    return [entry for start, entry in TABLE.get(block.page, {}).items() if block.code.startswith(start)]


def is_code(block: Block) -> bool:
    """Whether it needs an entry. A picture and a program's output do not; tables of contents are Sphinx's."""
    return block.language not in ("text", "{toctree}")


def faults(blocks: Sequence[Block]) -> Iterator[str]:
    """What is wrong with the blocks of all pages, compared with the table."""
    for block in blocks:
        found = entries_of(block) if is_code(block) else []
        if block.language not in LANGUAGES:
            yield f"{block} has the language {block.language!r}: write one of {', '.join(LANGUAGES)}"
        elif is_code(block) and len(found) != 1:
            yield f"{block} has {len(found)} entries in the table: write how it is run, or why it is not"
        elif any(not isinstance(entry, LANGUAGES[block.language]) for entry in found):
            yield f"{block} has an entry of another language"
        elif block.language == "text" and (COMMAND.search(block.code) or is_python(block.code)):
            yield f"{block} is text, but has commands or Python"
    for page, entries in TABLE.items():
        for start in entries:
            if not any(block.page == page and is_code(block) and block.code.startswith(start) for block in blocks):
                yield f"no block of {page} begins with {start!r}"


def is_python(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except SyntaxError:
        return False


LANGUAGES: dict[str, tuple[type, ...]] = {
    "python": (Fragment, By), "bash": (Commands, By, NotRun), "console": (Commands, By, NotRun),
    "diff": (By,), "toml": (By,), "yaml": (By,), "text": (), "{toctree}": (),
}  # fmt: skip


def test_each_block_is_run_or_the_table_says_why_not() -> None:
    assert not list(faults(every_block()))


@pytest.mark.parametrize(("page", "said"), [
    ("```python\nprint(rp)\n```", "usage has 0 entries"),
    ("- a list\n\n  ```bash\n  rallypoint watch RUN\n  ```", "usage has 0 entries"),
    ("~~~sh\nrallypoint watch RUN\n~~~", "usage has the language 'sh'"),
    ("```\nrallypoint watch RUN\n```", "usage has the language ''"),
    ("```text\nso:\nrallypoint watch RUN\n```", "usage is text, but has commands"),
    ("```text\nrun = rp.join()\n```", "usage is text, but has commands"),
    ("```bash\nimport rallypoint as rp\n```", "usage has an entry of another language"),
    ("", "no block of usage begins with 'import rallypoint as rp"),
])  # fmt: skip
def test_a_block_without_an_entry_is_told(page: str, said: str) -> None:
    others = [block for block in every_block() if block.page != "usage"]
    text = f"{PAGES['usage'].read_text()}\n{page}" if page else ""
    (one,) = faults([*others, *blocks_in("usage", text)])
    assert re.sub(r"^usage:\d+", "usage", one).startswith(said)


def test_the_tests_that_run_other_blocks_are_there_and_read_the_page() -> None:
    for page, entries in TABLE.items():
        for entry in {entry for entry in entries.values() if isinstance(entry, By)}:
            file, _, name = entry.test.partition("::")
            text = (TESTS / file).read_text()
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"there is no {entry.test}"
            assert PAGES[page].name in text, f"{file} does not read {page}"


# ---- Python ----


def swapped(code: str, swap: Mapping[str, str]) -> str:
    for before, after in swap.items():
        assert code.count(before) == 1, f"{before} is in the block {code.count(before)} times"
        code = code.replace(before, after)
    return code


def program(block: Block, entry: Fragment, ran: Path) -> tuple[str, set[int]]:
    """The whole program, and the numbers of the block's statements: each is written to `ran` when it runs."""
    code = re.sub(r", \.\.\.\)", ", **more)", swapped(block.code, entry.swap))
    code = re.sub(r"\bsteps=\d[\d_]{2,}", f"steps={STEPS}", code)
    before = f"RAN_FILE = {str(ran)!r}\n{PREAMBLE}\n{textwrap.dedent(entry.before)}\n"
    first = before.count("\n") + 1
    last = first + code.count("\n") - 1
    tree = ast.parse(f"{before}{code}{textwrap.dedent(entry.after)}\nif isinstance(job, Jobs):\n    job.end()\n")
    numbers = set[int]()
    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(statements := getattr(node, name, None), list):
                continue
            marked: list[ast.stmt] = []
            for one in statements:
                if one.lineno <= last and one.end_lineno >= first:
                    numbers.add(number := len(numbers))
                    marked += ast.parse(f"RAN({number})").body
                marked.append(one)
            setattr(node, name, marked)
    return ast.unparse(ast.fix_missing_locations(tree)), numbers


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT_")}
    programs = Path(sys.executable).parent
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(TESTS)}
    return {**kept, **path, "OMP_NUM_THREADS": "1", **more}


def run_fragments(fragments: Mapping[Block, Fragment], home: Path) -> None:
    """Run them one after the other, each in a folder of its own. All must end well, and each statement must run.

    Those with `under` are programs by themselves; the others are one program.
    """
    expected, alone = {}, []
    for block, entry in fragments.items():
        folder = home / str(block).replace(":", "-")
        folder.mkdir()
        code, expected[folder] = program(block, entry, folder / "ran")
        (folder / "block.py").write_text(code)
        for line in entry.first:
            (folder / "train.py").write_text(TRAIN)
            play(line, folder)
        if entry.under:
            play(f"{entry.under} block.py", folder)
        else:
            alone.append(str(folder))
    if alone:
        arguments = ["-c", DRIVER, *alone]
        status, output = run_program(arguments, home / "output", env=environment(), cwd=home)
        assert status == 0, output
    for folder, numbers in expected.items():
        ran = (folder / "ran").read_text().split()
        lines = (folder / "block.py").read_text().splitlines()
        left = [lines[i + 1].strip() for i, line in enumerate(lines) for n in numbers - {*map(int, ran)}
                if line.strip() == f"RAN({n})"]  # fmt: skip
        assert not left, f"of {folder.name} these have not run: {left}"


DRIVER = """
import os, runpy, sys, traceback
failed = False
for folder in sys.argv[1:]:
    os.chdir(folder)
    try:
        runpy.run_path(f"{folder}/block.py", run_name="__main__")
    except Exception:
        traceback.print_exc()
        failed = True
sys.exit(failed)
"""


def fragments(*, slow: bool) -> dict[str, tuple[Block, Fragment]]:
    return {
        str(block): (block, entry)
        for block in every_block() for entry in entries_of(block) if isinstance(entry, Fragment) and entry.slow == slow
    }  # fmt: skip


@pytest.mark.programs
@pytest.mark.parametrize("half", [0, 1])
def test_python_runs(half: int, tmp_path: Path) -> None:
    run_fragments(dict(list(fragments(slow=False).values())[half::2]), tmp_path)


@pytest.mark.programs
@pytest.mark.slow
@pytest.mark.parametrize("name", fragments(slow=True))
def test_python_that_takes_longer_runs(name: str, tmp_path: Path) -> None:
    run_fragments(dict([fragments(slow=True)[name]]), tmp_path)


@pytest.mark.programs
def test_python_with_a_mistake_fails(tmp_path: Path) -> None:
    given = ("stpes=2", "steps=2, codec=rp.Int9()", "batch=4, steps=2)\nif run.step > 99:\n    print(1")
    blocks = [Block("page", "python", f"run = job.train(model, dataset, {text})\n", n) for n, text in enumerate(given)]
    with pytest.raises(AssertionError, match=r"(?s)unknown field `stpes`.*has no attribute 'Int9'"):
        run_fragments(dict.fromkeys(blocks, Fragment()), tmp_path)
    (tmp_path / "last").mkdir()
    with pytest.raises(AssertionError, match=r"of page-2 these have not run: \['print\(1\)'\]"):
        run_fragments({blocks[2]: Fragment()}, tmp_path / "last")


# ---- Commands ----


def play(line: str, home: Path, *, columns: int = 160) -> str:
    """Play a line of a shell in this folder, and return what it prints. It has to end well, after "! " not.

    Programs of Python are forked from one that has imported torch. Other programs are the shell's.
    """
    fails, line = line.startswith("! "), line.removeprefix("! ")
    assigned, words, rest = split(line)
    env = environment(COLUMNS=str(columns), **assigned)
    if words[0] in ("rallypoint", "python") and set(rest[:1]) <= {">", "|"}:
        arguments = ["-m", "rallypoint.cli", *words[1:]] if words[0] == "rallypoint" else words[1:]
        arguments = [str(ROOT / one) if one.endswith(".py") and (ROOT / one).is_file() else one for one in arguments]
        status, output = run_program(arguments, home / "output", env=env, cwd=home)
        if rest[:1] == [">"]:
            (home / rest[1]).write_text(output)
        assert rest[:1] != ["|"] or rest == ["|", "cat"], f"write what is done with {rest}"
    else:
        done = subprocess.run(["bash", "-c", line], cwd=home, env=env, capture_output=True, text=True, timeout=240)
        status, output = done.returncode, done.stdout + done.stderr
    assert (status != 0) == fails, f"{line}: {status}\n{output}"
    return output


def split(line: str) -> tuple[dict[str, str], list[str], list[str]]:
    """The variables that a line sets, its words, and what follows from the first operator of the shell on."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words = list(reader)
    end = next((i for i, word in enumerate(words) if set(word) <= set("();<>|&")), len(words))
    first = next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), end)
    assigned = dict(word.split("=", 1) for word in words[:first])
    return assigned, words[first:end], words[end:]


def lines_of(block: Block) -> tuple[list[str], list[str]]:
    """The commands of a block, and the lines that it shows besides."""
    lines = [line for line in block.code.splitlines() if line.strip()]
    if block.language == "bash":
        return lines, []
    return [line[2:] for line in lines if line.startswith("$ ")], [line for line in lines if not line.startswith("$ ")]


def masked(line: str, exact: bool) -> str:
    """Without what differs from run to run: each word with a digit, and widths."""
    words = re.sub(r"([━─])+", r"\1", line).split()
    return " ".join(words if exact else ["#" if re.search(r"\d", word) else word for word in words])


def shows(line: str, printed: str) -> bool:
    """Whether `printed` is this line, or begins like it where it is shortened by dots."""
    parts = [re.escape(part) for part in line.split(" ... ")]
    return printed == line or (len(parts) > 1 and re.match(" .* ".join(parts), printed) is not None)


def play_block(block: Block, entry: Commands, home: Path, then: Block | None) -> None:
    """Play a block of commands; `then` is the block after it, which may be what they print."""
    commands, shown = lines_of(block)
    if then is not None and then.language == "text" and not entry.unlike:
        shown += [line for line in then.code.splitlines() if line.strip()]
    commands = swapped("\n".join(commands), entry.swap).splitlines()
    (home / "train.py").write_text(TRAIN)
    printed = [play(line, home) for line in entry.first]
    for start in entry.left_out:
        assert any(line.startswith(start) for line in commands), f"{block} has no line {start!r}"
    for line in commands:
        if not line.startswith(tuple(entry.left_out)):
            if shutil.which(name := split(line)[1][0]) is None and name != "rallypoint":
                pytest.skip(f"{name} is not installed")
            printed.append(play(f"{'! ' * entry.fails}{line}", home, columns=entry.columns))
    assert re.search(entry.says, "\n".join(printed), re.MULTILINE), printed
    if entry.unlike:
        return
    said = [masked(line, entry.exact) for line in "\n".join(printed).splitlines() if line.strip()]
    wanted = [masked(line, entry.exact) for line in shown if line.strip() != "..."]
    assert not [line for line in wanted if not any(shows(line, one) for one in said)], said
    if shown and len(wanted) == len(shown) and not entry.first:  # it is all that the commands print
        assert wanted == said


def commands_of(*, slow: bool) -> dict[str, tuple[Block, Commands, Block | None]]:
    """By name: the blocks of commands, and what stands after them."""
    after = [*every_block()[1:], None]
    return {
        str(block): (block, entry, then if then is not None and then.page == block.page else None)
        for block, then in zip(every_block(), after, strict=True)
        for entry in entries_of(block) if isinstance(entry, Commands) and entry.slow == slow
    }  # fmt: skip


@pytest.mark.programs
@pytest.mark.parametrize("name", commands_of(slow=False))
def test_commands_run_and_print_what_is_shown(name: str, tmp_path: Path) -> None:
    block, entry, then = commands_of(slow=False)[name]
    play_block(block, entry, tmp_path, then)


@pytest.mark.programs
@pytest.mark.slow
@pytest.mark.parametrize("name", commands_of(slow=True))
def test_commands_that_take_longer_run_and_print_what_is_shown(name: str, tmp_path: Path) -> None:
    block, entry, then = commands_of(slow=True)[name]
    play_block(block, entry, tmp_path, then)


def commands_on(page: str) -> list[str]:
    """Each command of ours in a block of a page, fenced or indented by four spaces."""
    text = PAGES[page].read_text()
    fenced = [line for block in every_block() if block.page == page and block.language in ("bash", "console")
              for line in lines_of(block)[0]]  # fmt: skip
    indented = re.findall(r"^    +(?:\$ )?((?:\w+=\S+ )*rallypoint .*)$", text, re.MULTILINE)
    return [line for line in [*fenced, *indented] if re.match(r"(?:\w+=\S+ )*rallypoint ", line)]


@cache
def the_command() -> Any:
    return typer.main.get_command(app)


def read(line: str) -> None:
    """Have the command line of the product read this command, to what its options mean together. Nothing is started."""
    words = split(re.sub(r"\$\w+", "1", line))[1][1:]
    command = the_command()
    context = typer.Context(command, info_name="rallypoint")
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
        if hasattr(command, "commands"):
            context = typer.Context(command, parent=context, info_name=name)
    given = command.make_context(name, words, parent=context)
    known = RunOptions.__struct_fields__ if "heartbeat" in given.params else ("sets",)
    options = {key: value for key, value in given.params.items() if key in known and value is not None}
    rest, settings = without_settings(given.args)
    if recipe := given.params.get("recipe"):
        check_recipe(recipe, rest)
        options["sets"] = [*(options.get("sets") or ()), *settings]
    RunOptions(**options | {"topology": None}).plan([], folder="x")  # (the file is not here)


@pytest.mark.parametrize("page", [page for page in PAGES if commands_on(page)])
def test_the_command_line_reads_each_command_of_a_page(page: str) -> None:
    for line in commands_on(page):
        try:
            read(line)
        except Exception as error:
            raise AssertionError(f"{page}: {line}: {error}") from error


@pytest.mark.parametrize(("line", "said"), [
    ("rallypoint run --workers two train.py", "two"), ("rallypoint run --set codec.type=int9 train.py", "int9"),
    ("rallypoint train gpt --stpes 5", "--stpes"), ("rallypoint k8s rendre --image x train.py", "rendre"),
    ("rallypoint replay runs/x --steps 3", "--steps"), ("rallypoint train gpt --set codec.rnak=3", "rnak"),
])  # fmt: skip
def test_a_command_with_a_mistake_is_refused(line: str, said: str) -> None:
    with pytest.raises(Exception, match=re.escape(said)):
        read(line)


# ---- The others ----


def test_the_topology_is_read(tmp_path: Path) -> None:
    """docs/topology.md."""
    (block,) = [block for block in every_block() if block.language == "toml"]
    (tmp_path / "topology.toml").write_text(block.code)
    topology = read_topology(tmp_path / "topology.toml")
    assert {name: (host.rack, host.link_mbit) for name, host in topology.hosts.items()} == {
        "node1": ("a", 10000), "10.0.0.8": ("b", 5000),
    }  # fmt: skip
    assert {name: rack.uplink_mbit for name, rack in topology.racks.items()} == {"b": 10000}


@pytest.mark.programs
def test_both_sides_of_the_difference_train(tmp_path: Path) -> None:
    """README.md: a script with DDP, here in one process, and what becomes of it."""
    (block,) = [block for block in every_block() if block.language == "diff"]
    assert all(re.match(r"[-+ ]", line) for line in block.code.splitlines())
    sides = {}
    for sign, before in (("-", DDP), ("+", "")):
        code = "".join(f"{line[1:]}\n" for line in block.code.splitlines() if line[0] in (" ", sign))
        sides[Block(f"side{sign}", "python", code, 1)] = Fragment(SIDES + before, after="assert step == 3")
    run_fragments(sides, tmp_path)


SIDES = """
steps, rank = 4, 0
def get_batch(step, rank):
    return [one[rank::2] for one in dataset.tensors]
"""
DDP = """
from torch.nn.parallel import DistributedDataParallel
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
"""
