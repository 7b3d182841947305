"""The table of what the heads of a trained model do, and pre-training's heads.

A fine-tuning task's `Behaviour` is in the task's own module.
"""

import numpy as np

from common import tensorflow_v1 as later
from common.errors import UserError
from finetuning import classification, ner, sides, squad
from finetuning.behaviour import INPUTS, SINGLE, Behaviour, text_and_shares
from model import tasks
from text_encoders.base import MASK


class EncoderBehaviour(Behaviour):
  """Shows a text as a vector, from the last layer's outputs."""

  def outputs(self, encoder):
    outputs = {"sequence_output": encoder.model.get_sequence_output()}
    pooled = encoder.model.get_pooled_output()
    if pooled is not None:
      outputs["pooled_output"] = pooled
    return outputs

  def answer(self, ids, outputs, context):
    tokens = outputs["sequence_output"][: len(ids)]
    vector = tokens.mean(axis=0) if context.pooling == "mean" else tokens[0]
    return {"pooling": context.pooling, "embedding": vector.tolist()}

  def answer_lines(self, answer):
    vector = answer["embedding"]
    of = "all tokens' mean" if answer["pooling"] == "mean" else "[CLS]"
    first = " ".join(f"{number:.3f}" for number in vector[:6])
    return [f"{len(vector)} numbers, {of}: {first} ... (--json: all)"]


class EmbeddingBehaviour(EncoderBehaviour):
  """A text's vector as the model's task makes it of the last layer."""

  head = tasks.EMBEDDING
  inputs = (*INPUTS, tasks.POOLED)
  kinds = (SINGLE,)
  sees_masks = False

  def outputs(self, encoder):
    from model import layers  # it loads TensorFlow

    tf = later.tf
    tokens = tf.cast(encoder.model.get_sequence_output(), tf.float32)
    vector = tokens[:, 0]
    if encoder.task.get("pooling", "mean") == "mean":
      members = tf.cast(encoder.pooled, tf.float32)[:, tf.newaxis]
      vector = layers.means_of(members, tokens)[:, 0]
    if encoder.task.get("normalize"):
      vector = tf.math.l2_normalize(vector, axis=-1)
    return {"embedding": vector}

  def arrays(self, ids, context):
    pooled = self._side(context).pooled
    masks = [np.zeros_like(row) for row in ids]
    for mask in masks:
      mask[pooled] = 1
    return {tasks.POOLED: masks}

  def encode(self, one, context):
    text = self._side(context).prompt + one.text
    encoded = super().encode(one._replace(text=text), context)
    return encoded._replace(texts={**encoded.texts, "text": one.text})

  def _side(self, context):
    length = context.max_seq_length
    return sides.of_task(context.task, tasks.QUERY, context.tokenizer, length)

  def answer(self, ids, outputs, context):
    pooling = context.task.get("pooling", "mean")
    return {"pooling": pooling, "embedding": outputs["embedding"].tolist()}


class NextSentenceBehaviour(Behaviour):
  """Says whether the second text of a pair follows the first."""

  head = tasks.NEXT_SENTENCE

  def outputs(self, encoder):
    import modeling  # it loads TensorFlow

    logits = modeling.next_sentence_logits(
      encoder.bert, encoder.features(self.head), encoder.policy
    )
    return {"log_probs": logits.log_probs()}

  def answer(self, ids, outputs, context):
    return {"is_next": float(np.exp(outputs["log_probs"][0]))}

  def answer_lines(self, answer):
    return [f"follows: {answer['is_next']:.1%}"]


class MaskedLmBehaviour(Behaviour):
  """Finds the most likely tokens for each [MASK]."""

  head = tasks.MASKED_LM
  inputs = (*INPUTS, tasks.POSITIONS)

  def outputs(self, encoder):
    import modeling  # it loads TensorFlow

    tf, model = later.tf, encoder.model
    # A model with `positions` has outputs at the positions only.
    positions = encoder.positions if model.positions is None else None
    logits = modeling.masked_lm_logits(
      encoder.bert,
      model.get_sequence_output(),
      model.get_embedding_table(),
      positions,
      encoder.policy,
    )
    size = [encoder.bert.vocab_size]
    shape = tf.concat([tf.shape(encoder.positions), size], 0)
    return {"log_probs": tf.reshape(logits.log_probs(), shape)}

  def arrays(self, ids, context):
    return {tasks.POSITIONS: [context.masks(row) for row in ids]}

  def encode(self, one, context):
    encoded = super().encode(one, context)
    if not len(context.masks(encoded.ids)):
      raise UserError(
        f"{one.text[:60]!r}...: its [MASK] is beyond the "
        f"{context.max_seq_length} tokens that are read: shorten the text, or "
        "give --max_seq_length"
      )
    return encoded

  def answer(self, ids, outputs, context):
    # Rows of the model beyond the vocabulary are no tokens.
    texts, masks = context.tokenizer.texts, []
    count = len(context.masks(ids))
    for log_probs in outputs["log_probs"][:count, : len(texts)]:
      mask = []
      for token in np.argsort(-log_probs, kind="stable")[: context.top_k]:
        probability = float(np.exp(log_probs[token]))
        mask.append({"word": texts[token], "probability": probability})
      masks.append(mask)
    return {"masks": masks}

  def answer_lines(self, answer):
    lines = []
    for mask in answer["masks"]:
      pairs = [(one["word"], one["probability"]) for one in mask]
      lines.append(f"{MASK}  {text_and_shares(pairs)}")
    return lines


# As in `tasks.BY_KIND`: a model is for what the last of its heads does.
BEHAVIOURS: dict[str, Behaviour] = {
  behaviour.signature: behaviour
  for behaviour in (
    EncoderBehaviour(),
    NextSentenceBehaviour(),
    MaskedLmBehaviour(),
    squad.QuestionBehaviour(),
    classification.LabelBehaviour(),
    ner.WordBehaviour(),
    EmbeddingBehaviour(),
  )
}
ENCODER = EncoderBehaviour().signature
NEXT_SENTENCE = tasks.NEXT_SENTENCE.signature
MASKED_LM = tasks.MASKED_LM.signature
