# An image with rallypoint, from the wheel in dist/:
#
#   make dist
#   docker build --tag me/rallypoint .
#   docker build --tag me/rallypoint --build-arg TORCH="torch --index-url URL" .   # a build for CPUs, from its index
#   docker build --tag me/rallypoint --build-arg EXTRAS="[ray]" .                  # for KubeRay
#
# Your own image adds your script and what it imports:
#
#   FROM me/rallypoint
#   COPY train.py .
#
# The roles, each in a container of its own (their options: docs/by-hand.md):
#
#   docker run --init me/rallypoint coordinator --bind 0.0.0.0:4700 --advertise HOST:4700 --token-file FILE
#   docker run --init me/rallypoint server --coordinator HOST:4700 --bind 0.0.0.0:4701 --advertise HOST2 --token-file FILE
#   docker run --init me/rallypoint worker --coordinator HOST:4700 --token-file FILE train.py

ARG PYTHON=3.13
FROM python:${PYTHON}-slim

# torch first and by itself: it takes longest, and changes least. Everything goes into the image's own Python: KubeRay
# starts Ray from a login shell, which would not find a virtual environment.
ARG TORCH="torch>=2.9"
RUN pip install --no-cache-dir --no-compile ${TORCH}
ARG EXTRAS=""
RUN --mount=type=bind,source=dist,target=/dist \
    pip install --no-cache-dir --no-compile "$(ls /dist/rallypoint-*.whl)${EXTRAS}"

# A number: a pod with runAsNonRoot cannot check a name.
RUN useradd --uid 1000 --create-home rallypoint
USER 1000
WORKDIR /home/rallypoint
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["rallypoint"]
CMD ["--help"]
