"""The package is described in pyproject.toml; what is here is what that cannot say: ``configs/`` goes into the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = Path(__file__).parent / "configs"


class BuildWithConfigs(build_py):
    """Copies the shipped configurations to where ``config/reading/shipped.py`` looks for them; sources are used in place."""

    def run(self) -> None:
        """Builds."""
        super().run()
        if not self.editable_mode:
            shutil.copytree(CONFIGS, Path(self.build_lib) / "mindllm" / "configs", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
