"""The command: one process writes everything, a second one the same bytes."""

import os
import subprocess
import sys

import pytest

from mla.report.__main__ import main


def test_import_needs_neither_torch_nor_triton():
    code = "import sys, mla.report.__main__; print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_second_run_writes_the_same_bytes(folder, tmp_path, readme_text):
    folder.change("absorbed", (128, 32768), status="out_of_memory")
    folder.add_studies()
    folder.add_hopper_sweep()
    folder.add_pipeline(mha=65536)
    folder.write()
    folder.write_first_call()
    written = []
    for seed in ("1", "2"):
        output, readme = tmp_path / f"figures{seed}", tmp_path / f"README{seed}.md"
        readme.write_text(readme_text, encoding="utf-8")
        command = [sys.executable, "-m", "mla.report", "--data", folder.path, "--output", output, "--readme", readme]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONHASHSEED": seed})
        assert (done.returncode, done.stderr) == (0, "")
        written.append({path.name: path.read_bytes() for path in output.iterdir()})
        assert done.stdout.count("wrote ") == len(written[-1]) + 1
    drawn = ("speedup", "tflops", "roofline", "tuning", "heads", "staircase", "pipeline")
    names = [f"{name}.{kind}" for name in drawn for kind in ("svg", "png")]
    names += ["results.md", "results.csv", "results.tex", "claims.md", "tuning.md", "tuning_hopper.md", "studies.md"]
    assert sorted(written[0]) == sorted(names)
    assert written[0] == written[1]


def test_readme_changes_only_between_the_markers(folder, tmp_path, readme_text):
    readme = tmp_path / "README.md"
    readme.write_text(readme_text, encoding="utf-8")
    arguments = ["--data", str(folder.write()), "--output", str(tmp_path / "figures"), "--readme", str(readme)]
    assert main(arguments) == 0
    text = readme.read_text(encoding="utf-8")
    assert not [name for name in ("headline", "results", "claims") if f"old {name}" in text]
    outside = [part.split("<!-- ")[0] for part in text.split(":end -->")]
    assert outside == ["before\n", "\nbetween\n", "\nbetween\n", "\nbetween\n"]
    assert "b128-n32768-h128" in text
    assert main(arguments) == 0
    assert readme.read_text(encoding="utf-8") == text


def test_notes_go_into_the_data_dictionary(folder, tmp_path, readme_text):
    readme, dictionary = tmp_path / "README.md", folder.path / "README.md"
    readme.write_text(readme_text, encoding="utf-8")
    dictionary.write_text("a <!-- notes:begin -->old<!-- notes:end --> b\n", encoding="utf-8")
    folder.write(notes="Two cards.")
    arguments = ["--data", str(folder.path), "--output", str(tmp_path / "figures")]
    assert main(arguments) == 0
    assert "old" in dictionary.read_text(encoding="utf-8")
    assert main([*arguments, "--readme", str(readme)]) == 0
    expected = "a <!-- notes:begin -->\n- `decode_h200_2026-01-02.csv`. Note: Two cards.\n<!-- notes:end --> b\n"
    assert dictionary.read_text(encoding="utf-8") == expected


def test_missing_marker_is_one_line_and_leaves_the_readme(folder, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("no markers\n", encoding="utf-8")
    status = main(["--data", str(folder.write()), "--output", str(tmp_path / "figures"), "--readme", str(readme)])
    error = capsys.readouterr().err
    assert status == 1
    assert error.count("\n") == 1
    assert error.startswith("error: expected one <!-- headline:begin -->")
    assert readme.read_text(encoding="utf-8") == "no markers\n"


def test_unknown_gpu_is_one_line(folder, capsys):
    assert main(["--data", str(folder.write()), "--gpu", "b200"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: expected decode_b200_<date>.csv")
    assert error.count("\n") == 1


def test_another_gpu_goes_to_a_folder_of_its_own(folder, tmp_path, readme_text, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(readme_text, encoding="utf-8")
    folder.write(gpu="h100", gpu_name="NVIDIA H100")
    assert main(["--gpu", "h100"]) == 0
    assert (tmp_path / "figures" / "h100" / "speedup.svg").is_file()
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["h100"]
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme_text
    with pytest.raises(SystemExit):
        main(["--gpu", "h100", "--readme", "README.md"])


def test_no_sweep_no_tuning(folder, tmp_path):
    for path in folder.write().glob("tune_*"):
        path.unlink()
    assert main(["--data", str(folder.path), "--output", str(tmp_path / "figures")]) == 0
    assert not [path for path in (tmp_path / "figures").iterdir() if "tuning" in path.name]


def test_without_studies_no_such_files(folder, tmp_path):
    assert main(["--data", str(folder.write()), "--output", str(tmp_path / "figures")]) == 0
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert names == {"speedup", "tflops", "roofline", "tuning", "results", "claims"}


def test_the_first_call_is_in_the_readme_where_it_was_measured(folder, tmp_path, readme_text):
    readme = tmp_path / "README.md"
    arguments = ["--data", str(folder.write()), "--output", str(tmp_path / "figures"), "--readme", str(readme)]
    for is_measured in (False, True):
        readme.write_text(readme_text, encoding="utf-8")
        if is_measured:
            folder.write_first_call()
        assert main(arguments) == 0
        for path in (readme, tmp_path / "figures" / "results.md"):
            assert ("The first call of a fresh process" in path.read_text(encoding="utf-8")) == is_measured


def test_list_shows_the_files(folder, capsys):
    main(["--data", str(folder.write()), "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["decode", "h200", "2026-01-02"], ["tune", "h200", "2026-01-02"]]


def test_readme_is_left_alone_where_other_folders_are_given(folder, tmp_path, monkeypatch):
    """Drawing elsewhere, from the repository's root, must not rewrite its README."""
    monkeypatch.chdir(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("no markers", encoding="utf-8")
    assert main(["--data", str(folder.write()), "--output", str(tmp_path / "elsewhere")]) == 0
    assert readme.read_text(encoding="utf-8") == "no markers"
