from runnerkit.dl import *

# isort: split
from runnerkit.catalyst.runners import Runner as Runner
from runnerkit.catalyst.runners import SelfSupervisedRunner as SelfSupervisedRunner
from runnerkit.catalyst.runners import SupervisedRunner as SupervisedRunner
