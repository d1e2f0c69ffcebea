"""The ready-made models and their data, in plain PyTorch: no cluster takes part here."""

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rallypoint.errors import ConfigError, DataError
from rallypoint.recipes import RECIPES
from rallypoint.recipes import gpt as gpt_recipe
from rallypoint.recipes import resnet as resnet_recipe
from rallypoint.recipes.gpt_model import GPT, GPTConfig
from rallypoint.recipes.recipe import choose_device, save_patiently
from rallypoint.recipes.resnet_model import ResNet, ResNetConfig, load_digits
from rallypoint.recipes.text import TextDataset, list_text_files, load_text, read_bytes, split_files, stdlib_folder

SMALLEST = GPTConfig(layers=2, heads=2, width=16, block=24)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALLEST)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Forty files in two folders, each a line repeated that names it; besides what must not be read."""
    for number in range(40):
        path = tmp_path / f"part{number % 2}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"file {number:02} says hello\n" * 20)
    for skipped in (".hidden", "__pycache__", "site-packages"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "no.py").write_text("SECRET" * 100)
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0" * 100)
    return tmp_path


class TestGPT:

    def test_starts_at_the_loss_of_a_blind_guess(self, gpt: GPT) -> None:
        tokens = torch.randint(256, (8, 24), generator=torch.Generator().manual_seed(1))
        assert gpt.loss(tokens, tokens.roll(-1, 1)).item() == pytest.approx(math.log(256), abs=0.1)

    def test_sees_only_the_past(self, gpt: GPT) -> None:
        tokens = torch.arange(24)[None]
        changed = tokens.clone()
        changed[0, 12:] += 1
        before, after = gpt(tokens), gpt(changed)
        torch.testing.assert_close(before[:, :12], after[:, :12])
        assert not torch.allclose(before[:, 12:], after[:, 12:])

    def test_input_and_output_embedding_are_one_parameter(self, gpt: GPT) -> None:
        assert gpt.head.weight is gpt.tokens.weight
        names = [name for name, _ in gpt.named_parameters()]
        assert "tokens.weight" in names
        assert "head.weight" not in names

    def test_generates_the_same_bytes_for_the_same_seed(self, gpt: GPT) -> None:
        first = gpt.generate(b"def ", 40, temperature=1.0, seed=7)
        torch.rand(5)
        assert gpt.generate(b"def ", 40, temperature=1.0, seed=7) == first
        assert gpt.generate(b"def ", 40, temperature=1.0, seed=8) != first
        assert len(first) == 40

    def test_generating_leaves_the_random_state_and_the_mode_alone(self, gpt: GPT) -> None:
        gpt.train()
        before = torch.get_rng_state()
        assert gpt.generate(b"", 0) == b""
        assert len(gpt.generate(b"", 3)) == 3
        assert torch.equal(torch.get_rng_state(), before)
        assert gpt.training

    def test_a_saved_model_gives_the_same_logits(self, gpt: GPT, tmp_path: Path) -> None:
        gpt.save(tmp_path / "run")
        loaded = GPT.load(tmp_path / "run")
        tokens = torch.arange(24)[None]
        assert loaded.config == gpt.config
        assert loaded.head.weight is loaded.tokens.weight
        assert torch.equal(loaded(tokens), gpt.eval()(tokens))

    def test_loading_from_an_empty_folder_says_what_to_give(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"holds no trained GPT.*give the run folder"):
            GPT.load(tmp_path)

    def test_a_broken_configuration_file_is_named(self, gpt: GPT, tmp_path: Path) -> None:
        gpt.save(tmp_path)
        (tmp_path / "model.json").write_text('{"layers": "many"}')
        with pytest.raises(DataError, match=r"holds no whole GPT \(Expected `int`"):
            GPT.load(tmp_path)

    def test_weights_that_a_full_disk_has_cut_are_named(self, gpt: GPT, tmp_path: Path) -> None:
        gpt.save(tmp_path)
        os.truncate(tmp_path / "model.safetensors", 1000)
        with pytest.raises(DataError, match=r"holds no whole GPT .*give another run folder"):
            GPT.load(tmp_path)

    @pytest.mark.parametrize("wrong", [{"width": 10, "heads": 3}, {"layers": 0}, {"dropout": 1.0}])
    def test_an_impossible_shape_is_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ConfigError):
            GPTConfig(**wrong)  # type: ignore[arg-type]

    def test_a_few_steps_reduce_the_loss(self, gpt: GPT, texts: Path) -> None:
        train, validation = load_text(texts, block=24)
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        windows = validation.fixed_windows(8)
        before = gpt_recipe.validation_loss(gpt, windows)
        for _ in range(30):
            pairs = [train[int(i)] for i in torch.randint(len(train), (8,), generator=generator)]
            loss = gpt.loss(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert gpt_recipe.validation_loss(gpt, windows) < before - 2.0

    def test_the_small_preset_has_the_size_it_claims(self) -> None:
        with torch.device("meta"):
            sizes = {n: sum(p.numel() for p in GPT(s.model).parameters()) for n, s in gpt_recipe.PRESETS.items()}
        assert sizes["tiny"] == pytest.approx(0.84e6, rel=0.01)
        assert sizes["small"] == pytest.approx(19.2e6, rel=0.01)


class TestText:
    def test_a_sample_is_a_window_and_the_same_one_byte_later(self) -> None:
        dataset = TextDataset(torch.arange(10, dtype=torch.uint8), block=4)
        x, y = dataset[5]
        assert len(dataset) == 6
        assert x.tolist() == [5, 6, 7, 8]
        assert y.tolist() == [6, 7, 8, 9]
        assert x.dtype == y.dtype == torch.int64
        with pytest.raises(IndexError):
            dataset[6]

    def test_only_text_is_read(self, texts: Path) -> None:
        (texts / "notes").write_text("no suffix, yet text: é" + "é" * 600)
        files = list_text_files(texts)
        assert len(files) == 41
        assert {path.suffix for path in files} == {".txt", ""}

    def test_no_file_is_in_both_splits(self, texts: Path) -> None:
        files = list_text_files(texts)
        train, validation = split_files(files)
        assert len(train) == 38
        assert validation == [files[19], files[39]]
        assert set(train) | set(validation) == set(files)
        for path, text in ((path, path.read_bytes()[:12]) for path in validation):
            assert text not in bytes(load_text(texts, block=24)[0].data.tolist()), path

    def test_a_single_file_keeps_its_end_for_validation(self, tmp_path: Path) -> None:
        (tmp_path / "all.txt").write_bytes(bytes(range(32, 127)) * 20)
        train, validation = load_text(tmp_path, block=24)
        assert torch.equal(torch.cat([train.data, validation.data]), read_bytes([tmp_path / "all.txt"], budget=10**6))
        assert len(validation.data) == 95

    def test_no_more_is_read_than_the_budget(self, texts: Path) -> None:
        train, validation = load_text(texts, block=24, budget=1000)
        assert len(train.data) == 950
        assert len(validation.data) == 50

    def test_fixed_windows_are_spread_and_always_the_same(self, texts: Path) -> None:
        _, validation = load_text(texts, block=24)
        x, y = validation.fixed_windows(10)
        assert x.shape == y.shape == (10, 24)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(validation.fixed_windows(10)[0], x)
        assert len(validation.fixed_windows(10**9)[0]) == len(validation)

    def test_an_empty_folder_is_named_with_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"holds no text: looked .* UTF-8 .* give --data") as caught:
            load_text(tmp_path, block=24)
        assert str(tmp_path) in str(caught.value)

    def test_a_folder_that_is_none_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="nowhere is not a folder"):
            load_text(tmp_path / "nowhere", block=24)

    def test_too_little_text_says_how_much_is_needed(self, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("short")
        with pytest.raises(DataError, match="one window needs 25"):
            load_text(tmp_path, block=24)

    def test_the_default_is_the_standard_library_without_its_tests(self) -> None:
        parts = {path.relative_to(stdlib_folder()).parts[0] for path in list_text_files()}
        assert "asyncio" in parts
        assert not parts & {"test", "idlelib", "site-packages", "dist-packages"}


class TestResNet:

    def test_a_saved_model_gives_the_same_logits(self, tmp_path: Path) -> None:
        model = ResNet(ResNetConfig(width=4, blocks=(1, 2)))
        images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        model(images)
        model.save(tmp_path)
        loaded = ResNet.load(tmp_path)
        assert loaded.config == model.config
        assert torch.equal(loaded(images), model.eval()(images))

    @pytest.mark.parametrize("blocks", [(), (1, 0)])
    def test_an_impossible_shape_is_refused(self, blocks: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError):
            ResNetConfig(blocks=blocks)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn brings the digits")
class TestDigits:

    def test_no_image_is_in_both_splits(self) -> None:
        train, validation = ({tuple(x.flatten().tolist()) for x in part.tensors[0]} for part in load_digits())
        assert not train & validation

    def test_a_few_steps_teach_most_of_them(self) -> None:
        torch.manual_seed(0)
        (images, labels), validation = load_digits()[0].tensors, load_digits()[1]
        model = ResNet(ResNetConfig(width=8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for _ in range(40):
            chosen = torch.randint(len(images), (64,), generator=generator)
            optimizer.zero_grad()
            model.loss(images[chosen], labels[chosen]).backward()
            optimizer.step()
        assert resnet_recipe.accuracy(model.eval(), validation) > 0.8


def test_without_scikit_learn_the_digits_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match="pip install 'scikit-learn"):
        load_digits()


class TestCommandLine:
    def test_every_recipe_has_a_main(self) -> None:
        for module in RECIPES.values():
            assert callable(importlib.import_module(module).main)

    def test_a_saved_model_generates_without_a_cluster(
        self, gpt: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        gpt.save(tmp_path)
        options = ["--load", str(tmp_path), "--prompt", "def ", "--length", "30", "--device", "cpu"]
        assert gpt_recipe.main(options) == 0
        first = capsys.readouterr().out
        assert gpt_recipe.main(options) == 0
        assert capsys.readouterr().out == first
        assert first.startswith("def ")

    def test_training_may_begin_with_a_saved_model(self, gpt: GPT, tmp_path: Path) -> None:
        gpt.save(tmp_path / "before")
        (tmp_path / "text.py").write_text("print('hello')\n" * 2000)
        options = ["--init", str(tmp_path / "before"), "--data", str(tmp_path), "--steps", "1", "--lr", "0",
                   "--device", "cpu", "--out", str(tmp_path / "after")]  # fmt: skip
        assert gpt_recipe.main(options) == 0
        after = GPT.load(tmp_path / "after")
        assert after.config == gpt.config
        assert all(torch.equal(a, b) for a, b in zip(after.parameters(), gpt.parameters(), strict=True))

    def test_an_error_is_one_sentence_and_status_1(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert gpt_recipe.main(["--load", str(tmp_path)]) == 1
        assert capsys.readouterr().err.startswith(f"error: {tmp_path} holds no trained GPT")

    def test_an_unknown_option_is_status_2(self) -> None:
        assert resnet_recipe.main(["--bogus"]) == 2

    def test_generated_control_characters_do_not_reach_the_terminal(self) -> None:
        assert gpt_recipe.readable(b"a\x1b[2J\n\xff") == "a\ufffd[2J\n\ufffd"

    def test_an_unknown_device_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="is no device"):
            choose_device("toaster")

    def test_a_model_that_a_full_disk_refuses_is_held_until_there_is_room(
        self, gpt: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tmp_path.joinpath("model.json").symlink_to("/dev/full")
        paused: list[float] = []

        def make_room(seconds: float) -> None:
            paused.append(seconds)
            if len(paused) == 3:
                tmp_path.joinpath("model.json").unlink()

        save_patiently(gpt.save, tmp_path, pause=make_room)
        assert paused == [1.0, 2.0, 4.0]
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 1, "it is said once"
        assert said[0].startswith(f"the model cannot be saved in {tmp_path} (")
        assert said[0].endswith("this process holds it and waits; make room there. Ctrl-C gives it up")
        assert GPT.load(tmp_path).config == gpt.config
