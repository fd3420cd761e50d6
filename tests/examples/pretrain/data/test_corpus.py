import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import corpus
import numpy
import pytest
import torch
from corpus import read_documents, split_of, standard_library_files, write_documents
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.job.arguments.indexed import check_indexed
from megatron.zero_bubble.planning.job.arguments.tokenizer import ByteLevelTokenizer


def documents_of(prefix: str) -> list[bytes]:
    """Read the documents with megatron-core; check and remove the end tokens."""
    data = IndexedDataset(prefix)
    assert len(data) == len(data.document_indices) - 1, "each document must be one sequence"
    documents = []
    for sequence in data:
        assert sequence[-1] == ByteLevelTokenizer.eod
        documents.append(bytes(int(token) for token in sequence[:-1]))
    return documents


class TestWriteDocuments:
    def test_round_trip(self, tmp_path: Path) -> None:
        prefix = str(tmp_path / "new" / "text")
        texts = ["naïve café".encode(), bytes(range(256)), b"x" * 5000]
        assert write_documents(prefix, [texts[0], b"", *texts[1:]]) == sum(len(text) + 1 for text in texts)
        check_indexed(prefix)
        assert documents_of(prefix) == texts

    def test_failure_leaves_no_files(self, tmp_path: Path) -> None:
        def broken() -> object:
            yield b"some text"
            raise UserError("line 2 is broken")

        with pytest.raises(UserError):
            write_documents(str(tmp_path / "text"), broken())  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []

    def test_failure_keeps_existing_files(self, tmp_path: Path) -> None:
        prefix = str(tmp_path / "text")
        write_documents(prefix, [b"old"])
        with pytest.raises(UserError, match="would contain no text"):
            write_documents(prefix, [b"", b""])
        assert documents_of(prefix) == [b"old"]


class TestReadDocuments:
    def read(self, path: Path, content: bytes, key: str = "text") -> list[bytes]:
        path.write_bytes(content)
        return list(read_documents([path], key))

    def test_json_lines_are_documents(self, tmp_path: Path) -> None:
        lines = b'{"text": "one"}\n\n{"body": "x", "text": "tw\\u00f6"}'
        assert self.read(tmp_path / "a.jsonl", lines) == [b"one", "twö".encode()]
        assert self.read(tmp_path / "a.jsonl", b'{"body": "x"}', "body") == [b"x"]

    def test_text_file_is_one_document(self, tmp_path: Path) -> None:
        assert self.read(tmp_path / "a.txt", b"one\n\ntwo\xff") == [b"one\n\ntwo\xff"]

    @pytest.mark.parametrize(
        ("second_line", "words"),
        [
            (b"not json", "not JSON"),
            (b'{"text": "cut off', "not JSON"),
            (b"\xff\xfe", "not JSON"),
            (b'{"body": "x", "title": "y"}', "text under 'text', got ['body', 'title']"),
            (b'{"text": 3}', "text under 'text'"),
            (b'["text"]', "got list"),
        ],
    )
    def test_invalid_line_is_reported_with_its_number(self, tmp_path: Path, second_line: bytes, words: str) -> None:
        with pytest.raises(UserError) as caught:
            self.read(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + second_line + b"\n")
        assert "a.jsonl, line 2: " in str(caught.value)
        assert words in str(caught.value)

    def test_missing_file_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="must be a readable file"):
            list(read_documents([tmp_path / "absent.txt"]))


class TestStandardLibrary:
    @pytest.fixture
    def library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A small fake of the interpreter's standard library."""
        root = tmp_path / "lib"
        for index in range(60):
            file = root / f"package{index % 3}" / f"module{index}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"value = {index}\n")
        for skipped in ("site-packages/other.py", "test/test_x.py", "package0/tests/y.py", "package0/data.txt"):
            (root / skipped).parent.mkdir(parents=True, exist_ok=True)
            (root / skipped).write_text("not ours\n")
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
        return root

    def test_every_file_is_in_one_split(self, library: Path, tmp_path: Path) -> None:
        prefixes = corpus.prepare_standard_library(str(tmp_path / "out" / "stdlib"))
        found = [text for prefix in prefixes.values() for text in documents_of(prefix)]
        assert sorted(found) == sorted(f"value = {index}\n".encode() for index in range(60))

    def test_split_depends_only_on_the_files_path(self) -> None:
        splits = [split_of(Path(f"folder/file{index}.py")) for index in range(1000)]
        assert [splits.count(split) for split in corpus.SPLITS] == pytest.approx([900, 50, 50], abs=25)
        assert split_of(Path("json/decoder.py")) == "train", "hashes must be equal on every machine"

    def test_output_is_deterministic(self, library: Path, tmp_path: Path) -> None:
        for name in ("a", "b"):
            corpus.prepare_standard_library(str(tmp_path / name / "stdlib"))
        for file in (tmp_path / "a").iterdir():
            assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()

    def test_complete_files_are_reused_and_incomplete_ones_rewritten(self, library: Path, tmp_path: Path) -> None:
        prefixes = corpus.prepare_standard_library(str(tmp_path / "stdlib"))
        whole, cut = Path(prefixes["train"] + ".bin"), Path(prefixes["valid"] + ".bin")
        inode, content = whole.stat().st_ino, cut.read_bytes()
        cut.write_bytes(content[:-1])
        corpus.prepare_standard_library(str(tmp_path / "stdlib"))
        assert whole.stat().st_ino == inode
        assert cut.read_bytes() == content

    def test_real_standard_library_is_large_enough(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = standard_library_files(root)
        assert sum(file.stat().st_size for file in files) > 5_000_000
        assert {split_of(file.relative_to(root)) for file in files} == set(corpus.SPLITS)


def run_script(*argv: str) -> int:
    from importlib.util import module_from_spec, spec_from_file_location

    path = Path(__file__).resolve().parents[4] / "scripts" / "prepare_data.py"
    spec = spec_from_file_location("prepare_data", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(list(argv))


class TestScript:
    def test_script_writes_data_from_users_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}))
        (tmp_path / "b.txt").write_text("two")
        inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
        assert run_script("--input", *inputs, "--output-prefix", str(tmp_path / "mine")) == 0
        assert documents_of(str(tmp_path / "mine")) == [b"one", b"two"]
        assert "8 tokens" in capsys.readouterr().out

    def test_invalid_line_prints_one_sentence_and_exits_with_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "a.jsonl").write_text("{}\n")
        assert run_script("--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "mine")) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and "line 1" in line

    def test_unwritable_output_exits_with_2(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.txt").write_text("text")
        (tmp_path / "file").write_text("")
        assert run_script("--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "file" / "x")) == 2
        assert "cannot be written" in capsys.readouterr().err


def test_files_equal_those_of_megatrons_builder(tmp_path: Path) -> None:
    documents = [b"one", b"", "zw\u00f6lf".encode(), b"x" * 300]
    write_documents(str(tmp_path / "ours"), documents)
    theirs = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=numpy.uint16)
    for document in filter(None, documents):
        ids = [*document, ByteLevelTokenizer.eod]
        theirs.add_document(torch.tensor(ids, dtype=torch.int32), [len(ids)])
    theirs.finalize(str(tmp_path / "theirs.idx"))
    for part in (".bin", ".idx"):
        assert (tmp_path / f"ours{part}").read_bytes() == (tmp_path / f"theirs{part}").read_bytes()


def test_preparing_data_does_not_import_torch(tmp_path: Path) -> None:
    """Importing torch and megatron-core takes seconds, a small data set milliseconds."""
    text = tmp_path / "one.txt"
    text.write_text("a few words")
    code = "import runpy, sys; sys.argv = sys.argv[1:]; names = runpy.run_path(sys.argv[0]); "
    code += "assert names['main'](sys.argv[1:]) == 0; assert not {'torch', 'megatron.core'} & {*sys.modules}"
    script = Path(__file__).parents[4] / "scripts" / "prepare_data.py"
    words = [str(script), "--input", str(text), "--output-prefix", str(tmp_path / "data")]
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=100, cwd=script.parent)
    check_indexed(str(tmp_path / "data"))
