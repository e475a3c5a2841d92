"""Plans that a test decides, and not the search: the one place where tests reach into the choice."""

import seqpart.plan.exact as exactplan
import seqpart.plan.search as search


def plans(patch, chosen):
    """The plan is what `chosen` predicts for (problem, method, micro-batch), where that fits."""

    def only(problem, method, micro_batch, _):
        prediction = chosen(problem, method, micro_batch)
        return prediction if prediction.peak <= problem.available else None

    patch.setattr(exactplan, "fastest", only)


def unspent(patch):
    """Memory that is left stays free: no partition stays, and none keeps its graphs."""
    patch.setattr(search, "spent", lambda *_: ())
    patch.setattr(search, "refined", lambda _, prediction, *__: prediction)
