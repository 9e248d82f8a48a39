"""The numeric contract: how right is right. For the project's own tests and for users' parity tests.

``assert_contract(op, inputs, backend)`` runs an op and judges it; ``judge(op, inputs, outputs, grads, douts)`` judges
results that were computed elsewhere. Needs torch alone.
"""

from .contract import Results as Results
from .contract import assert_contract as assert_contract
from .contract import contract_report as contract_report
from .contract import run as run
from .judge import judge as judge
from .report import ContractError as ContractError
from .report import Finding as Finding
from .report import Report as Report
from .same_dropout import same_dropout as same_dropout
