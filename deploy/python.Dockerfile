# The scheduler, with the `rara` command, and the Python executor: two targets of one file, since both are made of
# the same wheel and the same lock file.
#
#     docker build -f deploy/python.Dockerfile --target scheduler -t rara-scheduler .
#     docker build -f deploy/python.Dockerfile --target executor -t rara-executor .

# By release here; `--build-arg PYTHON=python@sha256:...` pins it to the byte.
ARG PYTHON=python:3.12-slim-bookworm

FROM ${PYTHON} AS installer
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
WORKDIR /source
COPY requirements/installer.lock requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --prefix=/opt/installer --require-hashes -r requirements/installer.lock
ENV PATH=/opt/installer/bin:$PATH
# What a package may be comes from the lock file, with its hashes; which are needed says pyproject.toml.
COPY requirements/runtime.lock requirements/build.in requirements/

FROM installer AS wheel
RUN --mount=type=cache,target=/root/.cache/uv \
    uv venv -q /opt/build \
    && uv pip install --python /opt/build -c requirements/runtime.lock -r requirements/build.in
COPY . .
RUN /opt/build/bin/hatchling build -t wheel -d /wheel

FROM installer AS scheduler-packages
COPY pyproject.toml .
RUN --mount=type=cache,target=/root/.cache/uv \
    uv venv -q /opt/rara \
    && uv pip install --python /opt/rara --require-hashes -c requirements/runtime.lock -r pyproject.toml \
        --extra scheduler --extra s3 --extra observability

FROM installer AS executor-packages
COPY pyproject.toml .
RUN --mount=type=cache,target=/root/.cache/uv \
    uv venv -q /opt/rara \
    && uv pip install --python /opt/rara --require-hashes -c requirements/runtime.lock -r pyproject.toml \
        --extra executor --extra observability

FROM ${PYTHON} AS runtime
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent rara \
    && install -d -o rara -g rara /var/lib/rara/blobs /var/lib/rara/executor /var/lib/rara/tokens
ENV PATH=/opt/rara/bin:$PATH PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM

# Packages and our own wheel are layers of their own: a change of our code leaves the large one as it is.
FROM runtime AS scheduler
COPY --from=scheduler-packages /opt/rara /opt/rara
RUN --mount=type=bind,from=installer,source=/opt/installer,target=/opt/installer \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /opt/installer/bin/uv pip install -q --no-cache --offline --no-deps --compile-bytecode --python /opt/rara /wheel/*.whl
COPY --chmod=0644 examples/knowledge_pipeline/definition.yaml /usr/share/rara/knowledge-pipeline.yaml
COPY --chmod=0644 examples/knowledge_pipeline/definition_go.yaml /usr/share/rara/knowledge-pipeline-go.yaml
USER 10001:10001
EXPOSE 7310
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --start-interval=1s \
    CMD ["python", "-m", "rara_scheduler.health"]
CMD ["rara-scheduler"]

FROM runtime AS executor
COPY --from=executor-packages /opt/rara /opt/rara
RUN --mount=type=bind,from=installer,source=/opt/installer,target=/opt/installer \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    /opt/installer/bin/uv pip install -q --no-cache --offline --no-deps --compile-bytecode --python /opt/rara /wheel/*.whl
ENV RARA_EXECUTOR_DIR=/var/lib/rara/executor RARA_EXECUTOR_READY_FILE=/tmp/rara-executor-ready
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --start-interval=1s \
    CMD ["python", "-m", "rara_executor.ready"]
CMD ["rara-executor"]
