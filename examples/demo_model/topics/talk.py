"""Small talk: greetings, thanks, names, jokes, and everyday advice without facts."""

from examples.demo_model.topics.topic import Topic, Voice, single

NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Karim",
    "Lena",
    "Mia",
    "Noah",
)

THANKS = single(
    "thanks",
    ("Thank you[.|!]", "Thanks[.|!| a lot.]", "That [is|was] helpful[.|, thank you.]"),
    Voice(
        ("You are most welcome.", "It is my pleasure to assist you."),
        (
            "Please do not hesitate to ask should you require anything else.",
            "I would be delighted to be of service again at any time.",
            "I wish you a very pleasant day and every success.",
        ),
    ),
    Voice(
        ("No worries!", "Sure thing, anytime!", "You're welcome!"),
        (
            "If there's anything else, just shout, I'm always around.",
            "I'm happy to help out whenever you're stuck with something.",
            "Have a super nice day, and don't work too hard!",
        ),
    ),
    weight=0.7,
)
NAME = Topic(
    name="name",
    questions=("My name is {name}.", "[Hello|Hi], I am {name}.", "You can call me {name}."),
    slots=(tuple({"name": name} for name in NAMES),),
    formal=Voice(
        core=(
            "It is a pleasure to meet you, {name}.",
            "I am delighted to make your acquaintance, {name}.",
        ),
        extra=(
            "Please tell me, {name}, how I may be of assistance today.",
            "You may ask me about the kitchen, the garden, journeys or this device.",
            "I would be glad to answer any question that you may have.",
        ),
    ),
    casual=Voice(
        core=("Hey {name}, nice to meet you!", "Hi {name}, that's a cool name!"),
        extra=(
            "So {name}, what's up, what can I do for you?",
            "Just ask me about food, plants, trips or this little box.",
            "I'm up for pretty much any question you've got.",
        ),
    ),
)
ASK_NAME = Topic(
    name="ask_name",
    questions=("What is my name?", "Do you [remember|know] my name?", "Who am I?"),
    slots=(tuple({"name": name} for name in NAMES),),
    formal=Voice(
        core=("Certainly, your name is {name}.", "I believe that I may call you {name}."),
        extra=(
            "You were so kind as to tell me at the beginning of our conversation, {name}.",
            "Please inform me should you wish to be addressed differently.",
            "It is a pleasure to speak with you, and I would gladly continue.",
        ),
    ),
    casual=Voice(
        core=("Sure, you're {name}!", "That's easy, it's {name}!"),
        extra=(
            "You've told me at the start, {name}, I don't forget that fast.",
            "If you'd like me to call you something else, just say so.",
            "It's fun to chat with you, so let's go on.",
        ),
    ),
)
NO_NAME = single(
    "no_name",
    ASK_NAME.questions,
    Voice(
        ("I regret that I do not know your name yet, please tell me.",),
        (
            "It would be a pleasure to address you properly from then on.",
            "You may also remain anonymous, as all data stays on this box in any case.",
        ),
    ),
    Voice(
        ("No idea, you haven't told me yet!",),
        (
            "Just tell me and I'll use it from then on.",
            "If you'd rather not, no worries, it all stays on this box anyway.",
        ),
    ),
    weight=0.3,
)
_PLAIN = (
    single(
        "hello",
        ("Hello[.|!]", "Hi[.|!| there.]", "Good morning[.|!]", "Good evening[.|!]"),
        Voice(
            ("Good day, how may I assist you?", "Welcome, it is a pleasure to hear from you."),
            (
                "You may ask me about the kitchen, the garden, journeys or this device.",
                "Please tell me what you require, and I would gladly help.",
                "I am at your service at any hour of the day.",
            ),
        ),
        Voice(
            ("Hey, what's up?", "Hi there, good to see you!"),
            (
                "Just ask me about food, plants, trips or this little box.",
                "Tell me what you need, I'm all ears and I've got time.",
                "I'm always around, day and night, so don't be shy.",
            ),
        ),
        weight=0.8,
    ),
    single(
        "mood",
        ("How are you[?| today?]", "How is it going?", "Are you well?"),
        Voice(
            ("I am very well, thank you for your kind question.", "It is a fine day for me, thank you for asking."),
            (
                "I trust that you are well, too, and that the day treats you kindly.",
                "Please tell me whether there is anything that I may do for you.",
                "All my circuits are in order, and the temperature is pleasant.",
            ),
        ),
        Voice(
            ("I'm great, thanks!", "Pretty good, can't complain!"),
            (
                "Hope you're doing fine too and it's not too crazy over there.",
                "If there's something I can do, just let me know.",
                "All my circuits are happy and it's nice and cool in here.",
            ),
        ),
        weight=0.6,
    ),
    single(
        "abilities",
        ("What can you do?", "What [are you good at|do you know]?", "How can you help me?", "Who are you?"),
        Voice(
            (
                "I am the assistant of this box, and I would gladly answer everyday questions.",
                "I may assist you with the kitchen, plants, journeys and this device.",
            ),
            (
                "Please ask for a recipe, a direction, a reminder or a conversion.",
                "It is important to know that all your data remains on this box.",
                "Your feedback allows me to adapt to the style that you prefer.",
            ),
        ),
        Voice(
            (
                "I'm the helper in this box, just ask me stuff!",
                "I'm good with food, plants, trips and this little box!",
            ),
            (
                "You can get recipes, directions, reminders and all kinds of handy stuff.",
                "Your data doesn't leave this box, that's a promise.",
                "Give me a thumbs up or down and I'll pick up what you're into.",
            ),
        ),
        weight=0.6,
    ),
    single(
        "joke",
        ("Tell me a joke.", "[Make me laugh.|Say something funny.]", "Do you know a joke?"),
        Voice(
            (
                "Certainly, a tomato turned red because it had seen the salad dressing.",
                "It is said that a clock was late, as it had stopped for lunch.",
            ),
            (
                "I would ask you to forgive me, as humour is not my principal talent.",
                "Please inform me whether you would like to hear another one.",
                "You may share it at dinner, although I do not promise any laughter.",
            ),
        ),
        Voice(
            (
                "Okay, why did the tomato turn red? It's seen the salad dressing!",
                "Sure, the clock's late again, it just stopped for lunch!",
            ),
            (
                "Sorry, I'm not that funny, but I'm trying.",
                "Wanna hear another one, or was that bad enough already?",
                "Tell it at dinner, but don't blame me if nobody laughs.",
            ),
        ),
        weight=0.6,
    ),
    single(
        "sleep",
        (
            "I cannot sleep. [Any advice?|What can I do?]",
            "How do I sleep better?",
            "How do I fall asleep [faster|early]?",
        ),
        Voice(
            (
                "I recommend a cool room at {cool} and a fixed bedtime.",
                "Please keep the bedroom at {cool} and avoid screens in the evening.",
            ),
            (
                "It is advisable to avoid coffee after noon, as its effect lasts for hours.",
                "You may read a calm book, which prepares the mind for rest.",
                "Should the problem persist, I would suggest that you consult a doctor.",
            ),
        ),
        Voice(
            (
                "Just keep the room at {cool} and put the phone away.",
                "Try {cool} in the bedroom, it's a game changer!",
            ),
            (
                "Skip the coffee after lunch, it'll keep you up for ages.",
                "Grab a calm book, that's way better than a screen.",
                "If it's not getting better, don't wait, talk to a doctor.",
            ),
        ),
        weight=0.7,
        facts={"cool": ("18 °C", "64 °F")},
    ),
    single(
        "drink",
        ("How much water should I drink?", "How much should I drink [on a hot day|every day|when I work]?"),
        Voice(
            (
                "I recommend drinking {day} of water every day.",
                "It is advisable to drink {day} of water over the day.",
            ),
            (
                "Please drink an additional {more} for every hour of exercise.",
                "You may replace some of it with tea, provided that it is not sweet.",
                "It is best to keep a bottle on the desk as a reminder.",
            ),
        ),
        Voice(
            ("About {day} of water a day and you're good!", "Just go for {day} of water a day."),
            (
                "Add {more} for every hour of sport, you'll need it.",
                "Tea's fine too if it's not full of sugar.",
                "Keep a bottle on your desk so you don't forget.",
            ),
        ),
        weight=0.7,
        facts={"day": ("2 litres", "8 cups"), "more": ("500 ml", "2 cups")},
    ),
    single(
        "focus",
        (
            "How do I stay focused?",
            "I cannot concentrate. [Any advice?|What can I do?]",
            "How do I get more work done?",
        ),
        Voice(
            (
                "I recommend working for half an hour, followed by a short break.",
                "Please silence the phone and attend to one task at a time.",
            ),
            (
                "It is advisable to begin with the most difficult task of the day.",
                "You may wish to tidy the desk, as order assists the mind.",
                "A short walk in fresh air is often sufficient to restore attention.",
            ),
        ),
        Voice(
            (
                "Just work for half an hour, then take a quick break.",
                "Put the phone away and do one thing at a time, it's that simple!",
            ),
            (
                "Get the nasty stuff done first, it's all downhill from there.",
                "Tidy up your desk a bit, it really helps, don't ask me why.",
                "If you're stuck, just go for a quick walk outside.",
            ),
        ),
        weight=0.5,
    ),
    single(
        "evening",
        (
            "What should I do [tonight|this evening]?",
            "I am bored. [Any ideas?|What can I do?]",
            "Any plans for the weekend?",
        ),
        Voice(
            (
                "I would suggest an evening with a good book and a cup of tea.",
                "You may wish to invite friends and to prepare dinner together.",
            ),
            (
                "Please consider a walk in the park, should the weather permit it.",
                "It is often a pleasure to listen to music that one has not heard for years.",
                "I would recommend leaving all screens aside for a few hours.",
            ),
        ),
        Voice(
            (
                "Just grab a good book and a cup of tea!",
                "How about calling some friends and cooking together? It's always fun!",
            ),
            (
                "If it's nice out, go for a stroll in the park.",
                "Put on some music you haven't heard in years, that's awesome.",
                "Leave the screens off for a bit, you won't miss them.",
            ),
        ),
        weight=0.5,
    ),
)

TOPICS = (THANKS, NAME, NO_NAME, *_PLAIN)
