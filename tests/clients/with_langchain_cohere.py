"""langchain-cohere: embeddings and rerank."""

from checks import QUERY, TEXTS, Site, check, main, same, same_ranking, same_rows
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document


@check("CohereEmbeddings: embed_documents, embed_query")
def embeddings(site: Site) -> None:
    made = CohereEmbeddings(model=site.embedder, cohere_api_key="none", base_url=site.root)
    same_rows(made.embed_documents(TEXTS), site.rows)
    same_rows([made.embed_query(TEXTS[0])], site.rows[:1])


@check("CohereRerank: rerank, compress_documents")
def rerank(site: Site) -> None:
    made = CohereRerank(model=site.reranker, cohere_api_key="none", base_url=site.root, top_n=3)
    found = made.rerank(TEXTS, QUERY)
    same_ranking([(each["index"], each["relevance_score"]) for each in found], site.ranking)
    kept = made.compress_documents([Document(text) for text in TEXTS], QUERY)
    same([each.page_content for each in kept], [TEXTS[index] for index, _ in site.ranking])


if __name__ == "__main__":
    main("langchain-cohere")
