"""Here-documents of a job script end where bash ends them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, Conversion
from hpc_ddp.submission.job_script.importer import import_script

HEAD = "#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=1\n"


def of_text(tmp_path: Path, text: str) -> Conversion:
    (tmp_path / "train.py").write_text("import torch\n")
    return import_script(text, tmp_path, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "cat > f <<ARGS\nARGS_A='--lr 1'\nexport KEEP=1\nARGS\n",
        "cat > f <<'EOF'\nEOF_RUN=$3\n EOF\nEOF x\nEOF\n",
        'cat > f <<"E O F"\nE O F x\nE O F\n',
        "cat <<-EOF > f\n\tEOF_A\n EOF\n\tEOF\n",
        "cat <<\\EOF | tee f\nEOF_A\n\tEOF\nEOF\necho EOF >> f\n",
        ": # cat <<EOF\nX=3; cat > f <<< EOF$X\ncat >> f <<EOF\nEOF_A\nEOF\n",
        "cat > f <<\\EOF\n$A\nEOF\n",
        "cat > f <<EOF\nEND_1\nEOFS\nEOF\n",
        "cat > f <<EOF\ncat <<E\nEOF_1\nE\nEOF\nexport B=1\n",
    ],
)
def test_a_line_that_begins_with_the_end_is_a_line_of_the_text(text: str, tmp_path: Path) -> None:
    result = of_text(tmp_path, f"{HEAD}{text}srun python train.py\n")
    settings = result.settings()
    assert settings["script"] == "train.py"
    assert "KEEP" not in settings.get("env", {})
    assert LOST not in {result.group(n)[0] for n in range(3, text.count("\n") + 3)}
    for name, lines in (("old", text), ("new", "\n".join(settings["setup"]))):
        (tmp_path / name).mkdir()
        subprocess.run(["bash", "-c", lines], cwd=tmp_path / name, check=True)
    assert (tmp_path / "old" / "f").read_text() == (tmp_path / "new" / "f").read_text()


def test_a_job_in_such_a_document_is_read(tmp_path: Path) -> None:
    job = f"{HEAD}EOF_RUN=3\nEOFS=4\nsrun python train.py $EOF_RUN\n"
    result = of_text(tmp_path, f"#!/bin/bash\nsbatch <<'EOF'\n{job}EOF\n")
    assert result.settings()["args"] == ["3"]
    yaml = "cat > c.yaml <<E\nErrors: 1\nmixed_precision: bf16\nE\n"
    launch = "srun accelerate launch --config_file c.yaml train.py\n"
    settings = of_text(tmp_path, f"{HEAD}{yaml}{launch}").settings()
    assert settings["env"] == {"ACCELERATE_MIXED_PRECISION": "bf16"}


def test_a_launch_in_such_a_text_is_read(tmp_path: Path) -> None:
    text = "read -r -d '' CMD <<E\npython train.py --a \\\nE_1 --b\nE\nsrun bash -c \"$CMD\"\n"
    assert of_text(tmp_path, HEAD + text).settings()["args"] == ["--a", "E_1", "--b"]
