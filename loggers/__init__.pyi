# Written by scripts/public_names.py from the __all__ of each file: run `make format`.
from runnerkit.logger import ILogger as ILogger
from runnerkit.loggers.console import ConsoleLogger as ConsoleLogger
from runnerkit.loggers.csv import CSVLogger as CSVLogger
from runnerkit.loggers.jsonl import JSONLLogger as JSONLLogger
from runnerkit.loggers.services.comet import CometLogger as CometLogger
from runnerkit.loggers.services.mlflow import MLflowLogger as MLflowLogger
from runnerkit.loggers.services.wandb import WandbLogger as WandbLogger
from runnerkit.loggers.tensorboard import TensorboardLogger as TensorboardLogger
