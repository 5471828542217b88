"""Bad modules that no check sees, with the reason; the documentation lists them."""

__all__ = ["NOT_SEEN"]

NOT_SEEN: dict[str, str] = {
    "data_set_with_memory": "its memory is full after the first batch, and changes no sample then",
    "data_set_reads_another_row": "the data set reads other rows itself",
    "data_set_fitted_to_all_records": "the data set read all rows when it was made",
    "GradientThroughData": "autograd counts no write through `.data`",
    "OptimizerEditsTheGradient": "the user's optimizer edits between its closure and its update",
    "StepLeftOut": "the module's `optimizer_step` undoes an update, in steps that follow the records",
    "CounterInAClosure": "a function's own variables are in no snapshot: counted as not compared",
    "StateOfTheFile": "global variables are in no snapshot",
    "DefaultArgument": "default arguments are in no snapshot",
    "CallbackSetsTheScale": "callbacks are never run twice",
}
