from runnerkit.callbacks import *
from runnerkit.data import *
from runnerkit.engines import *
from runnerkit.loggers import *
from runnerkit.precision import AMP as AMP
from runnerkit.precision import FP32 as FP32
from runnerkit.precision import Precision as Precision
from runnerkit.runner import IRunner as IRunner
from runnerkit.steps.budget import Budget as Budget
from runnerkit.supervised import SelfSupervisedRunner as SelfSupervisedRunner
from runnerkit.supervised import SupervisedRunner as SupervisedRunner
from runnerkit.train import Runner as Runner
from runnerkit.warmup import WarmupLR as WarmupLR
from runnerkit.warmup import cosine_with_warmup as cosine_with_warmup
