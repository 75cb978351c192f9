"""LlamaIndex: embeddings of OpenAI and of TEI, rerank of TEI and of Cohere."""

from checks import QUERY, TEXTS, Site, check, main, same, same_ranking, same_rows
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TeiRerank


def nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, id_=str(number))) for number, text in enumerate(TEXTS)]


def ranked(found: list[NodeWithScore]) -> list[tuple[int, float]]:
    return [(int(each.node_id), each.score) for each in found]


@check("OpenAIEmbedding: texts, a query, asynchronously")
async def openai(site: Site) -> None:
    made = OpenAIEmbedding(model_name=site.embedder, api_base=site.url, api_key="none", max_retries=0)
    same_rows(made.get_text_embedding_batch(TEXTS), site.rows)
    same_rows([made.get_query_embedding(TEXTS[0])], site.rows[:1])
    same_rows(await made.aget_text_embedding_batch(TEXTS), site.rows)


@check("TextEmbeddingsInference: texts, a query, asynchronously")
async def tei(site: Site) -> None:
    made = TextEmbeddingsInference(
        model_name=site.embedder, base_url=site.root, text_instruction="", query_instruction=""
    )
    same_rows(made.get_text_embedding_batch(TEXTS), site.rows)
    same_rows([made.get_query_embedding(TEXTS[0])], site.rows[:1])
    same_rows(await made.aget_text_embedding_batch(TEXTS), site.rows)


@check("tei_rerank")
def tei_rerank(site: Site) -> None:
    made = TeiRerank(base_url=site.root, model_name=site.reranker, top_n=3)
    same_ranking(ranked(made.postprocess_nodes(nodes(), query_str=QUERY)), site.ranking)


@check("CohereRerank")
def cohere_rerank(site: Site) -> None:
    made = CohereRerank(model=site.reranker, api_key="none", base_url=site.root, top_n=2)
    found = ranked(made.postprocess_nodes(nodes(), query_str=QUERY))
    same_ranking(found, site.ranking[:2])
    same(len(found), 2)


if __name__ == "__main__":
    main("llama-index-core")
