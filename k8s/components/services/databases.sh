#!/bin/sh
# Run once, by the image's entry point, on an empty volume: a user and databases for each server.
set -eu
psql -v ON_ERROR_STOP=1 -v prefect="$PREFECT_DATABASE_PASSWORD" -v mlflow="$MLFLOW_DATABASE_PASSWORD" \
    --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
CREATE USER prefect PASSWORD :'prefect';
CREATE USER mlflow PASSWORD :'mlflow';
CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
SQL
