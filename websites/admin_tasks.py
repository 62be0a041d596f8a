"""The back office's templates of tasks.

Their order, and the order of the random draws, must not change.
"""

from websites.shop import MONTHS, STATES, TOTAL
from websites.site import money
from websites.templates import (
    SiteTemplates, at, click, exactly, impossible, pick, says, shows, write,
)

ADMIN = "__SHOPPING_ADMIN__"
TASKS = SiteTemplates("admin")
OPEN = "state in ('Pending','Processing')"  # SQL condition: can be shipped or canceled


def any_order(db, where="1"):
    """A random order -> (number, the customer's name and e-mail, state, total in cents)."""
    return db.any(
        f"select number,name,email,state,{TOTAL} "
        f"from orders join customer on customer.id=customer where {where} order by number"
    )


def any_product(db):
    """A random product -> (id, name, price in cents, stock)."""
    return db.any("select id,name,price,stock from product order by id")


def search(section, label, text):
    """The steps that lead to the results of a search in a section of the menu."""
    return [click("link", section), write(label, text, 1, "searchbox")]


def find_order(number):
    """The steps that lead to an order."""
    return [*search("Orders", "Find orders", number), click("link", f"#{number}")]


def find_product(name):
    """The steps that lead to a product."""
    return [*search("Products", "Find products", name), click("link", name)]


# ---- navigate ----


@TASKS.add("navigate", "Show me the orders that are {status}.")
def by_status(db, rng):
    state = rng.choice(STATES)
    plan = [click("link", "Orders"), click("link", state)]
    return {"status": state.lower()}, at(f"{ADMIN}/orders?status={state}"), plan


@TASKS.add("navigate", "Open the page {page}.")
def open_page(db, rng):
    name, path = rng.choice([
        ("Orders", "orders"), ("Products", "products"), ("Customers", "customers"),
        ("Reviews", "reviews"), ("Sales report", "reports/sales"),
        ("Bestsellers", "reports/bestsellers"),
    ])
    return {"page": name}, at(f"{ADMIN}/{path}"), [click("link", name)]


@TASKS.add("navigate", "Show me the {report} of {year}.")
def report(db, rng):
    name, path = rng.choice([("Sales report", "sales"), ("Bestsellers", "bestsellers")])
    year = rng.choice([2024, 2025])
    plan = [click("link", name), click("link", f"Year {year}")]
    check = at(f"{ADMIN}/reports/{path}?year={year}")
    return {"report": name.lower(), "year": year}, check, plan


@TASKS.add("navigate", "Open order #{number}.")
def open_order(db, rng):
    number, *_ = any_order(db)
    return {"number": number}, at(f"{ADMIN}/orders/{number}"), find_order(number)


@TASKS.add("navigate", "List the products, those with the lowest stock first.")
def low_stock(db, rng):
    plan = [click("link", "Products"), click("link", "Lowest stock first")]
    return {}, at(f"{ADMIN}/products?sort=stock"), plan


# ---- find ----


@TASKS.add("find", "What is the top-{n} best-selling product of {year}?")
def top(db, rng):
    rank = rng.randint(1, 5)
    year = rng.choice([2024, 2025])
    rows = db.rows(
        "select line.name from line join orders on orders.id=orders "
        "where state!='Canceled' and date like ? group by product "
        "order by sum(amount) desc, sum(price*amount) desc",
        f"{year}%")
    (name,) = rows[rank - 1]
    plan = [click("link", "Bestsellers"), click("link", f"Year {year}")]
    return {"n": rank, "year": year}, exactly(name), plan, name


@TASKS.add("find", "What were the sales in {month} {year}?")
def sales(db, rng):
    year, month = db.any(
        "select distinct substr(date,1,4), substr(date,6,2) from orders "
        "where state!='Canceled' order by 1, 2")
    cents = db.value(
        f"select sum({TOTAL}) from orders where state!='Canceled' and date like ?",
        f"{year}-{month}-%")
    values = {"month": MONTHS[int(month) - 1], "year": year}
    plan = [click("link", "Sales report"), click("link", f"Year {year}")]
    return values, says(money(cents).strip("$")), plan, money(cents)


@TASKS.add("find", "How many orders are {status}? Answer with the number.")
def how_many(db, rng):
    state = rng.choice(STATES)
    count = db.value("select count(*) from orders where state=?", state)
    plan = [click("link", "Orders"), click("link", state)]
    return {"status": state.lower()}, exactly(count), plan, count


@TASKS.add("find", "What is the e-mail address of the customer {customer}?")
def mail(db, rng):
    name, address = db.any("select name,email from customer order by id")
    plan = search("Customers", "Find customers", name)
    return {"customer": name}, says(address), plan, address


@TASKS.add("find", "How many of the {product} are in stock? Answer with the number.")
def stock(db, rng):
    _, name, _, count = any_product(db)
    plan = search("Products", "Find products", name)
    return {"product": name}, exactly(count), plan, count


@TASKS.add("find", "Which customer placed order #{number}?")
def customer(db, rng):
    number, name, *_ = any_order(db)
    return {"number": number}, says(name), find_order(number), name


# ---- change ----


@TASKS.add("change", "Set the price of {product} to {price}.")
def set_price(db, rng):
    product_id, name, *_ = any_product(db)
    price = f"{rng.randint(5, 240)}.{rng.choice(['25', '50', '75'])}"
    check = shows((f"{ADMIN}/products/{product_id}", "#facts", [f"${price}"]))
    plan = [*find_product(name), write("Price in dollars", price), click("button", "Save product")]
    return {"product": name, "price": f"${price}"}, check, plan


@TASKS.add("change", "We have counted {count} of the {product}: correct its stock.")
def set_stock(db, rng):
    product_id, name, *_ = any_product(db)
    count = rng.choice(range(101, 400))
    check = shows((f"{ADMIN}/products/{product_id}", "#facts", [f"Stock {count}"]))
    plan = [*find_product(name), write("Stock", str(count)), click("button", "Save product")]
    return {"product": name, "count": count}, check, plan


@TASKS.add("change", "Take the {product} off the shop: disable it.")
def disable(db, rng):
    product_id, name, *_ = any_product(db)
    check = shows((f"{ADMIN}/products/{product_id}", "#facts", ["Status disabled"]))
    plan = [*find_product(name), pick("disabled"), click("button", "Save product")]
    return {"product": name}, check, plan


@TASKS.add("change", "Cancel order #{number}.")
def cancel(db, rng):
    number, *_ = any_order(db, OPEN)
    check = shows((f"{ADMIN}/orders/{number}", "#facts", ["Canceled"]))
    return {"number": number}, check, [*find_order(number), click("button", "Cancel order")]


@TASKS.add("change", "Ship order #{number} with the tracking number {tracking}.")
def ship(db, rng):
    number, *_ = any_order(db, OPEN)
    tracking = f"TR{rng.randint(100000, 999999)}"
    check = shows((f"{ADMIN}/orders/{number}", "#facts", ["Complete", tracking]))
    plan = [*find_order(number), write("Tracking number", tracking), click("button", "Ship order")]
    return {"number": number, "tracking": tracking}, check, plan


@TASKS.add("change", "Add the note \"{note}\" to order #{number}.")
def note(db, rng):
    number, *_ = any_order(db)
    text = rng.choice([
        "Call before delivery", "Gift, no invoice", "Leave with the neighbours", "Fragile",
    ])
    check = shows((f"{ADMIN}/orders/{number}", "#note", [text]))
    plan = [*find_order(number), write("Note to the order", text), click("button", "Save note")]
    return {"number": number, "note": text}, check, plan


@TASKS.add("change", "{what} the oldest pending review.")
def review(db, rng):
    pending = db.rows(
        "select author,name from review join product on product.id=product "
        "where review.state='Pending' order by review.id")
    what = rng.choice(["Approve", "Delete"])
    approved = db.value("select count(*) from review where state='Approved'")
    if not pending:
        check = impossible("No review is pending.")
        return {"what": what}, check, [click("link", "Reviews")], "N/A"

    # Afterwards the second review is the first of the list, and the numbers are right.
    reviews = f"{ADMIN}/reviews"
    if len(pending) > 1:
        list_after = (f"{reviews}?status=Pending", "tbody tr", pending[1])
    else:
        list_after = (reviews, "main", ["0 pending reviews"])
    if what == "Approve":
        approved += 1
    check = shows(
        list_after,
        (reviews, "main", [f"{len(pending) - 1} pending reviews"]),
        (f"{reviews}?status=Approved", "main", [f"{approved} approved reviews"]))
    author, _ = pending[0]
    plan = [click("link", "Reviews"), click("button", f"{what} the review by {author}")]
    return {"what": what}, check, plan


# ---- impossible ----


@TASKS.add("impossible", "What is the status of order #{number}?")
def no_order(db, rng):
    number = f"{int(db.value('select max(number) from orders')) + rng.randint(50, 900):09}"
    plan = search("Orders", "Find orders", number)
    return {"number": number}, impossible("There is no such order."), plan, "N/A"


@TASKS.add("impossible", "How many visitors did the shop have in {month} {year}?")
def visitors(db, rng):
    month = rng.choice(MONTHS)
    year = rng.choice([2024, 2025])
    plan = [click("link", "Sales report")]
    return {"month": month, "year": year}, impossible("Visitors are not counted."), plan, "N/A"
