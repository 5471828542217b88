"""Bad modules that no check sees, with the reason; the documentation lists them."""

__all__ = ["NOT_SEEN"]

NOT_SEEN: dict[str, str] = {
    "data_set_with_memory": "its memory is full after the first batch, and changes no sample then",
    "data_set_reads_another_row": "the data set reads other rows itself",
    "data_set_fitted_to_all_records": "the data set read all rows when it was made",
    "OptimizerEditsTheGradient": "the user's optimizer edits between its closure and its update",
    "LearningRateByTheLoss": "settings of the optimizer are not compared with a schedule",
    "PlateauByHand": "settings of the optimizer are not compared with a schedule",
    "StepLeftOut": "weights are put back after the optimizer's step",
    "WeightsWrittenThroughData": "a hook writes weights after the step, only if a record is odd",
    "MomentumByTheLoss": "settings of the optimizer are not compared with a schedule",
    "ManualStepSize": "settings of the optimizer are not compared with a schedule",
    "OnlyInLargeBatches": "needs large values in a large batch",
    "CallbackSetsTheScale": "a callback sets an attribute only if a record is odd",
    "LoggedMetricInTheLoss": "the loss reads a metric of the Trainer, and only large values change it",
    "StateOnTheTrainer": "the state is on the Trainer, and only large values change it",
    "RandomStateAsMemory": "the state is the random state, and only large values change it",
    "EverySecondStep": "a run of 16 steps may have no check on such a step",
}
