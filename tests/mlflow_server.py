"""A server of MLflow without the parts that need more packages: arguments are folder and host.

It writes its port to the folder's file ``port``.
"""

import os
import sys
from pathlib import Path

from werkzeug.serving import make_server

folder = Path(sys.argv[1])
os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{folder}/runs.sqlite"
os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = str(folder / "artifacts")

from mlflow.server import app  # noqa: E402  # it reads the variables

server = make_server(sys.argv[2], 0, app, threaded=True)
draft = folder / "draft"
draft.write_text(str(server.server_port))
draft.rename(folder / "port")
server.serve_forever()
