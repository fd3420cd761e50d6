"""What ``advise`` reads: flags, pasted commands, configuration files; and what it says of those that it cannot use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from tests.cli.test_advise import SMALL, Capture


@pytest.mark.parametrize(
    ("own", "job", "words"),
    [
        ([], ["--pipeline-model-parallel-size", "1"], "advice is about pipelines of 2 or more ranks; got"),
        (["--may-change", "layers"], [], "--may-change takes micro-batch-size, recompute, pipeline; got 'layers'"),
        (["--may-change", "pipeline", "--costs", "none.json"], [], "none.json"),
        (["--gpu-memory", "1p"], [], "--gpu-memory needs a size in bytes, such as 80GiB; got 1p"),
        (["--gpu-memory", "80"], [], "--gpu-memory needs a size in bytes, such as 80GiB; got 80; write 80GiB"),
        (["--host-bandwidth", "0"], [], "--host-bandwidth"),
        (["--row", "9", "--write", "x.json"], [], "--row must be from 1 to"),
        ([], ["--num-layers", "15"], "--num-layers must be divisible by the number of pipeline stages, got 15"),
        ([], ["--zero-bubble-schedule", "zb-vv"], "zb-vv"),
    ],
)
def test_errors_are_sentences(capsys: Capture, own: list[str], job: list[str], words: str) -> None:
    assert main(["advise", "--quick", "--gpus-per-node", "4", *own, "--", *SMALL, *job]) == 2
    out, err = capsys.readouterr()
    assert words in err and "Traceback" not in err
    assert out == "" or "--row" in own, "how many rows there are is known only after planning"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--", "run.sh"], "what follows -- must be the flags of the job, which begin with --; got run.sh; give the"),
        (
            ["run.sh", *SMALL],
            "got run.sh; give the flags themselves, as the training script gets them, or its folder to",
        ),
        (
            ["--", " ".join(SMALL)],
            "got '--num-layers 16 --hidden-size 1024 --num' and more in one; leave out the quotes",
        ),
        (["--", "--num-layers", "8"], "give them as flags"),
        (["--gpu-memory", "80G", "--", *SMALL], "got 80G; write 80GiB"),
        (["--", "--num-layer", *SMALL[1:]], "; --num-layer is no flag that is known here, did you mean --num-layers?"),
        (
            ["--", *(word.replace("pipeline-model-parallel", "pipeline-parallel") for word in SMALL)],
            "no bubble; --pipeline-parallel-size is no flag that is known here, did you mean --pipeline-model-parallel",
        ),
    ],
)
def test_other_words_than_flags_are_refused_with_a_remedy(capsys: Capture, words: list[str], sentence: str) -> None:
    assert main(["advise", "--quick", "--gpus-per-node", "4", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_pasted_command_counts_as_the_flags_of_its_script(capsys: Capture) -> None:
    own = ["advise", "--quick", "--gpus-per-node", "4", "--"]
    assert main([*own, *SMALL]) == 0
    as_flags = capsys.readouterr().out
    assert main([*own, "torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *SMALL]) == 0
    assert capsys.readouterr().out == as_flags


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("torchrun --nnodes 2 --nproc-per-node=2", marks=pytest.mark.full),
        "srun -N 2 --ntasks-per-node=2 python -m torch.distributed.run",
    ],
)
def test_a_pasted_launcher_says_how_many_nodes_there_are(capsys: Capture, launcher: str) -> None:
    assert main(["advise", "--quick", "--nodes", "2", "--gpus-per-node", "2", "--", *SMALL]) == 0
    as_flags = capsys.readouterr().out
    assert main(["advise", "--quick", "--", *launcher.split(), "pretrain_gpt.py", *SMALL]) == 0
    assert capsys.readouterr().out == as_flags


def test_a_configuration_file_of_our_loop_is_read(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    pairs = zip(SMALL, [*SMALL[1:], "--"], strict=True)
    given = {word[2:]: value for word, value in pairs if word.startswith("--")}
    file.write_text(
        "".join(f"{name}: {'true' if value.startswith('--') else value}\n" for name, value in given.items())
    )
    command = ["advise", "--quick", "--gpus-per-node", "4", "--format", "json", "--"]
    assert main([*command, "--config", str(file)]) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert main([*command, *SMALL]) == 0
    assert json.loads(capsys.readouterr().out) == from_file
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    assert main([*command, "--config", str(file)]) == 2
    assert "which describes a model for another library; write its sizes as flags" in capsys.readouterr().err


def test_flags_of_a_job_are_needed(capsys: Capture) -> None:
    for words in (["--nodes", "2"], ["--nodes", "2", "--"]):
        assert main(["advise", *words]) == 2
        assert "come last, after a separate --; got none" in capsys.readouterr().err


def test_unknown_flags_are_named(capsys: Capture) -> None:
    flags = [*SMALL, "--use-mcore-models", "--pipline-model-parallel-size", "8", "--recompute-granulrity", "full"]
    command = ["--gpus-per-node", "4", "--", *flags]
    assert main(["advise", "--quick", *command]) == 0
    lines = capsys.readouterr().out.splitlines()
    unknown = "--use-mcore-models --pipline-model-parallel-size --recompute-granulrity"
    said = [
        f"Not checked here, only by Megatron-LM: {unknown}",
        "--pipline-model-parallel-size is no flag that is known here; did you mean --pipeline-model-parallel-size?",
        "--recompute-granulrity is no flag that is known here; did you mean --recompute-granularity?",
    ]
    assert [line for line in lines if line in said] == said
    assert main(["dry-run", "--megatron-lm", *command]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in said] == said
    assert main(["advise", "--quick", "--format", "json", *command]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["not_read"] == unknown.split()


def test_the_vocabulary_is_that_of_the_tokenizer(capsys: Capture, tmp_path: Path) -> None:
    at = SMALL.index("--vocab-size")
    rest = [*SMALL[:at], *SMALL[at + 2 :]]
    rest = [word for word in rest if word not in ("--tokenizer-type", "NullTokenizer")]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128_256}))
    asks = "Megatron-LM asks the tokenizer"
    for flags, note in (
        (["Llama2Tokenizer"], "The vocabulary of 32,000 is that of Llama2Tokenizer, padded."),
        (
            ["HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)],
            f"The vocabulary of 128,256 is that of {tmp_path / 'config.json'}, padded.",
        ),
        (
            ["HuggingFaceTokenizer"],
            f"A vocabulary of 50,304 is assumed, since {asks}: give --vocab-size, because gains depend on it.",
        ),
    ):
        assert main(["dry-run", "--megatron-lm", "--gpus-per-node", "4", "--", *rest, "--tokenizer-type", *flags]) == 0
        assert note in capsys.readouterr().out.splitlines()
