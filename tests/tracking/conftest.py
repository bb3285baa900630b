"""A browser for MLflow's page."""

from tests.flows.conftest import page as page
