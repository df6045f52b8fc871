"""Says which packages there are, and installs the top-level folder cost_profiles/ inside autopar."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["autopar", "autopar.*"]), "autopar.cost_profiles"],
    package_dir={"autopar.cost_profiles": "cost_profiles"},
    package_data={"autopar": ["py.typed", "**/*.json", "show/page/*"], "autopar.cost_profiles": ["*.json"]},
)
